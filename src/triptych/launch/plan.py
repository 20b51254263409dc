"""Turns serving options and GPU lists into the processes of a group."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from triptych.config import host_port, tcp_url
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.launch.args import ServerArgs
from triptych.launch.group import ProcessSpec
from triptych.launch.options import OPTIONS
from triptych.launch.ports import free_ports

VARIABLES = frozenset(option.variable for option in OPTIONS)
"""What they say reaches a child on its command line, if it is to."""

Gpus = Sequence[Sequence[int]]
"""GPUs of each instance of a role: one inner list per instance."""


class PoolGpus(TypedDict, total=False):
    """GPUs of the instances of a pool, by what they are. Encoder and decoder have little to do beside the denoiser, so
    one instance can have both."""

    encoder_gpus: Gpus
    denoiser_gpus: Gpus
    decoder_gpus: Gpus
    encoder_decoder_gpus: Gpus
    replica_gpus: Gpus


KINDS: dict[str, tuple[str, tuple[Role, ...]]] = {
    "encoder_gpus": ("encoder", (Role.ENCODER,)),
    "denoiser_gpus": ("denoiser", (Role.DENOISER,)),
    "decoder_gpus": ("decoder", (Role.DECODER,)),
    "encoder_decoder_gpus": ("encoder-decoder", (Role.ENCODER, Role.DECODER)),
    "replica_gpus": ("replica", ROLES),
}
"""What instances of each kind of `PoolGpus` are called, and their roles."""

DRAIN_MARGIN = 10.0
"""Seconds that an instance may take beside those of its --drain-timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """A server and its instances."""

    url: str
    """HTTP address of the server."""
    server: ProcessSpec
    instances: tuple[ProcessSpec, ...]

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All of them, the server first."""
        return (self.server, *self.instances)


def plan_pool(args: ServerArgs, *, first_work_port: int | None = None, **gpus: Unpack[PoolGpus]) -> GroupPlan:
    """A server with instances of these GPUs.

    On the CPU a list's length is the number of instances, and its GPU numbers say nothing. Work ports are free ones, or
    ``first_work_port`` and the ones after it. Raises `ConfigError` when the pool would lack a role or an option is
    impossible.
    """
    wanted = [
        (f"{name}-{number}", roles, ids)
        for kind, (name, roles) in KINDS.items()
        for number, ids in enumerate(gpus.get(kind, ()))
    ]
    missing = [role for role in ROLES if not any(role in roles for _, roles, _ in wanted)]
    if missing:
        raise ConfigError(f"no instance for {', '.join(missing)}: give each role at least one")
    # Built here only to hear of what is impossible before any process starts.
    args.for_child("server", disagg_role="server").server_config()
    first = first_work_port or free_ports(len(wanted))[0]
    urls: dict[Role, list[str]] = {role: [] for role in ROLES}
    instances: list[ProcessSpec] = []
    for port, (name, roles, ids) in enumerate(wanted, first):
        spec = instance_spec(args, name=name, roles=roles, gpus=ids, work_port=port, threads=len(wanted))
        instances.append(spec)
        for role in roles:
            urls[role].append(spec.address)
    named = {f"{role}_urls": tuple(addresses) for role, addresses in urls.items()}
    serving = args.for_child("server", disagg_role="server", **named)
    url = f"http://{host_port(reachable(args.host), args.port)}"
    return GroupPlan(
        url=url,
        server=ProcessSpec(
            name="server",
            command=serve_command(serving.words),
            address=url,
            withheld=VARIABLES,
            stop_turn=len(ROLES) if "drain_timeout" in args.given else 0,
        ),
        instances=tuple(instances),
    )


def instance_spec(
    args: ServerArgs,
    *,
    name: str,
    roles: tuple[Role, ...],
    gpus: Sequence[int],
    work_port: int,
    threads: int,
    **overrides: str,
) -> ProcessSpec:
    """One instance of the server that ``args`` describes. On the CPU, ``threads`` instances share the cores."""
    said: dict[str, object] = {
        "disagg_role": ",".join(roles),
        "disagg_server_addr": tcp_url(reachable(args.host), args.scheduler_port),
        "scheduler_port": work_port,
        **args.for_roles(roles),
        **overrides,
    }
    if len(gpus) > 1:
        said["num_gpus"] = len(gpus)
    if args.device != "cpu":
        if list(gpus) != list(range(gpus[0], gpus[0] + len(gpus))):
            raise ConfigError(f"{name}: GPUs {list(gpus)}: those of one instance must follow one another")
        said["base_gpu_id"] = gpus[0]
    for role in set(ROLES) - set(roles):  # what was said of other roles is for other instances of the group
        said |= {key: None for key in args.given if key.startswith(f"{role}_")}
    serving = args.for_child("instance", **said)
    config = serving.instance_config(default_device="cpu")
    environment: dict[str, str] = {}
    if args.device != "cuda" and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (threads * config.ranks)))
    return ProcessSpec(
        name=name,
        command=serve_command(serving.words),
        address=config.work_url,
        environment=environment,
        withheld=VARIABLES,
        **_leaving(args, roles),
    )


class _Leaving(TypedDict, total=False):
    stop_turn: int
    stop_seconds: float


def _leaving(args: ServerArgs, roles: tuple[Role, ...]) -> _Leaving:
    """When an instance stops in a group that was told how long its work may take: role by role in the order in which a
    request passes them, so that each has somebody to hand its work on to. Those of all roles have nobody."""
    if "drain_timeout" not in args.given or len(roles) == len(ROLES):
        return {}
    return {"stop_turn": max(map(ROLES.index, roles)), "stop_seconds": args.drain_timeout + DRAIN_MARGIN}


def serve_command(words: Sequence[str]) -> tuple[str, ...]:
    """The command of a ``triptych serve`` process in this Python."""
    return (sys.executable, "-m", "triptych.cli.main", "serve", *words)


def reachable(host: str) -> str:
    """An address of this machine under which a listener on ``host`` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
