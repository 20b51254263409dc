"""The groups of processes that the serving benchmark compares: started, waited for, and stopped again."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from triptych.launch.args import ServerArgs
from triptych.launch.group import Group
from triptych.launch.plan import Gpus, GroupPlan, PoolGpus, plan_pool
from triptych.launch.pool import LaunchError, Pool
from triptych.launch.ports import free_ports

_NOTE = re.compile(r"loaded model=| read in |warmed up for|: (on|off) \(|CUDA graph")
_LOADED = re.compile(r"\[(\S+)\] loaded model=.* seconds=([\d.]+)")
_READY_SECONDS: Final = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """A model, the GPUs of its instances, and options of ``triptych serve`` for every process."""

    model: str
    gpus: PoolGpus
    options: Mapping[str, Any]

    @property
    def gpu_ids(self) -> list[int]:
        """The GPUs that the roles use between them."""
        return sorted({gpu for lists in cast(Mapping[str, Gpus], self.gpus).values() for ids in lists for gpu in ids})

    @property
    def gpu_count(self) -> int:
        """How many those are; on the CPU, how many numbers were said."""
        return len(self.gpu_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A group of processes that is ready."""

    url: str
    notes: tuple[str, ...]
    """What its instances said of their start: time to load and warm up, techniques that are on or off."""

    @property
    def loads(self) -> dict[str, float]:
        """Seconds that each instance took to load and warm up, as far as it was heard."""
        found = (_LOADED.search(note) for note in self.notes)
        return {match[1]: float(match[2]) for match in found if match is not None}


def planned(arrangement: Arrangement, args: ServerArgs, *, replicas: bool) -> GroupPlan:
    """The processes of the roles apart, or a replica on each GPU of theirs: what is compared has equally many."""
    if replicas:
        return plan_pool(args, replica_gpus=[[gpu] for gpu in arrangement.gpu_ids])
    return plan_pool(args, **arrangement.gpus)


@contextlib.contextmanager
def running(arrangement: Arrangement, *, replicas: bool) -> Generator[Running]:
    """A ready server with the roles apart, or with one instance of all roles on each of the same GPUs.

    Raises `LaunchError` with the last lines of the processes when it does not come up.
    """
    port, frontend, *_ = free_ports(5)
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        said = {"output_dir": f"{folder}/outputs", **arrangement.options}
        args = ServerArgs.from_kwargs(model_path=arrangement.model, port=port, scheduler_port=frontend, **said)
        plan = planned(arrangement, args, replicas=replicas)
        lines: deque[str] = deque(maxlen=60)
        notes: list[str] = []

        def hear(name: str, line: str) -> None:
            lines.append(f"[{name}] {line}")
            if _NOTE.search(line):
                notes.append(f"[{name}] {line.split(' ', 4)[-1]}")  # without time, level and instance

        group = Group(plan.processes, output=hear)
        group.start()
        with Pool(plan, group) as pool:
            try:
                pool.wait_ready(_READY_SECONDS)
            except LaunchError as error:
                raise LaunchError("\n".join([error.message, *lines])) from error
            yield Running(url=plan.url, notes=tuple(notes))
