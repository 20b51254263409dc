"""Keeps a whole pool at saturation for a while and watches what its processes hold: memory, descriptors, segments.

A server, an encoder, a denoiser and a decoder with the embedded model, each a process of its own, get requests of
several shapes from a closed loop of HTTP clients. After a warm-up nothing may grow: what a process holds in the last
quarter of the samples is compared with what it held in the first. The least counts, which is what it keeps between two
requests: an encoder of video, for one, takes 50 MiB while it works and gives them back.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from triptych.errors import StageError
from triptych.launch.args import ServerArgs
from triptych.launch.pool import Pool, launch_pool_disagg_server
from triptych.launch.ports import free_ports
from triptych.transport.data.segments import segments

GROWTH = 0.01
"""Share by which the resident memory of a process may grow after the warm-up."""
RETAINED = 100
"""Ended jobs that the server keeps: few, so that it keeps that many from early on."""
_SHAPES: tuple[dict[str, Any], ...] = (
    {"size": "32x32", "num_frames": 5, "num_inference_steps": 2},
    {"size": "64x32", "num_frames": 5, "num_inference_steps": 3},
    {"size": "64x64", "num_frames": 9, "num_inference_steps": 2},
)
_READY_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one process holds at one moment."""

    resident: int
    """Bytes."""
    descriptors: int
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One process over the whole soak: at the end of the warm-up, and at the end."""

    name: str
    before: Held
    after: Held

    @property
    def growth(self) -> float:
        """Share by which its memory grew."""
        return self.after.resident / self.before.resident - 1


@dataclass(kw_only=True, slots=True)
class Soak:
    """What came out."""

    rows: list[Row]
    requests: int
    seconds: float
    segments: tuple[int, int]
    """Shared-memory segments that the processes have open or mapped, at the end of the warm-up and at the end."""
    complaints: list[str] = field(default_factory=list[str])

    def judge(self) -> list[str]:
        """What grew although it must not; empty when all is well."""
        found = list(self.complaints)
        for row in self.rows:
            if row.growth >= GROWTH:
                found.append(f"{row.name}: memory grew by {row.growth:.2%}, {GROWTH:.0%} is allowed")
            for what in ("descriptors", "threads"):
                before, after = getattr(row.before, what), getattr(row.after, what)
                if after > before:
                    found.append(f"{row.name}: {before} {what} became {after}")
        if self.segments[1] > self.segments[0]:
            found.append(f"{self.segments[0]} shared-memory segments became {self.segments[1]}")
        return found


def run_soak(seconds: float, *, in_flight: int = 6, warm_up: float = 0.3, plane: str = "shm") -> Soak:
    """Soak a pool for ``seconds``, of which the share ``warm_up`` goes first.

    Raises `StageError` when a process ends or is restarted, and `LaunchError` when the pool does not come up.
    """
    lines: list[str] = []
    port, scheduler, *_ = free_ports(5)
    with tempfile.TemporaryDirectory(prefix="triptych-soak-") as folder:
        options = ServerArgs.from_kwargs(
            model_path="tiny",
            device="cpu",
            port=port,
            scheduler_port=scheduler,
            disagg_transfer=plane,
            disagg_transfer_pool_size="32MiB",
            output_dir=Path(folder) / "outputs",
            retain_count=RETAINED,
        )
        pool = launch_pool_disagg_server(
            options,
            encoder_gpus=[[0]],
            denoiser_gpus=[[0]],
            decoder_gpus=[[0]],
            output=lambda name, line: lines.append(f"[{name}] {line}"),
        )
        with pool:
            pool.wait_ready(_READY_SECONDS)
            return uvloop.run(_soak(pool, seconds, warm_up, in_flight))


async def _soak(pool: Pool, seconds: float, warm_up: float, in_flight: int) -> Soak:
    ends: dict[str, int] = {}
    began = time.monotonic()
    stop = asyncio.Event()
    samples: list[tuple[dict[str, Held], int]] = []
    async with httpx.AsyncClient(base_url=pool.url, timeout=120, trust_env=False) as http, asyncio.TaskGroup() as group:
        for number in range(in_flight):
            group.create_task(_client(http, number, stop, ends))
        await asyncio.sleep(seconds * warm_up)
        interval = max(0.05, seconds * (1 - warm_up) / 100)
        while time.monotonic() < began + seconds:
            samples.append(_look(pool))
            await asyncio.sleep(interval)
        stop.set()
    quarter = max(1, len(samples) // 4)
    first, last = samples[:quarter], samples[-quarter:]
    rows = [Row(name=name, before=_least(first, name), after=_least(last, name)) for name in samples[0][0]]
    complaints = [f"{number} requests ended {status}" for status, number in ends.items() if status != "completed"]
    return Soak(
        rows=rows,
        requests=sum(ends.values()),
        seconds=time.monotonic() - began,
        segments=(min(count for _, count in first), min(count for _, count in last)),
        complaints=complaints,
    )


async def _client(http: httpx.AsyncClient, number: int, stop: asyncio.Event, ends: dict[str, int]) -> None:
    while not stop.is_set():
        shape = _SHAPES[number % len(_SHAPES)]
        number += 1
        answer = await http.post("/v1/videos", json={"prompt": "a red ball", "seed": number} | shape)
        answer.raise_for_status()
        job = answer.json()
        while job["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            job = (await http.get(f"/v1/videos/{job['id']}")).raise_for_status().json()
        if job["status"] == "completed":
            (await http.get(f"/v1/videos/{job['id']}/content")).raise_for_status()
        ends[job["status"]] = ends.get(job["status"], 0) + 1


def _look(pool: Pool) -> tuple[dict[str, Held], int]:
    held: dict[str, Held] = {}
    shared: set[str] = set()
    for status in pool.statuses():
        if status.pid is None or status.restarts:
            raise StageError(f"{status.name} ended during the soak: {status.detail}")
        process = psutil.Process(status.pid)
        with process.oneshot():
            held[status.name] = Held(
                resident=process.memory_info().rss, descriptors=process.num_fds(), threads=process.num_threads()
            )
        shared |= segments(status.pid)
    return held, len(shared)


def _least(samples: Sequence[tuple[dict[str, Held], int]], name: str) -> Held:
    held = [sample[name] for sample, _ in samples]
    return Held(
        resident=min(one.resident for one in held),
        descriptors=min(one.descriptors for one in held),
        threads=min(one.threads for one in held),
    )


def show(soak: Soak, console: Console) -> None:
    """Print what each process held."""
    title = f"{soak.requests:,} requests in {soak.seconds:.0f} s, after the warm-up and at the end"
    table = Table(title=title)
    for heading in ("process", "MiB", "MiB at the end", "growth", "descriptors", "threads"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for row in soak.rows:
        table.add_row(
            row.name,
            f"{row.before.resident / 2**20:.1f}",
            f"{row.after.resident / 2**20:.1f}",
            f"{row.growth:+.2%}",
            f"{row.before.descriptors} {row.after.descriptors}",
            f"{row.before.threads} {row.after.threads}",
        )
    console.print(table)
    console.print(f"shared-memory segments: {soak.segments[0]}, {soak.segments[1]}")


def main(arguments: Sequence[str]) -> int:
    """``triptych bench soak``: soak, print, and say with the exit status whether anything grew."""
    parser = argparse.ArgumentParser(prog="triptych bench soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long, the warm-up included (default: 600)")
    parser.add_argument("--in-flight", type=int, default=6, help="requests that clients keep going at once")
    parser.add_argument("--plane", choices=("shm", "mooncake"), default="shm", help="how tensors travel")
    options = parser.parse_args(arguments)
    soak = run_soak(options.seconds, in_flight=options.in_flight, plane=options.plane)
    show(soak, Console())
    found = soak.judge()
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0
