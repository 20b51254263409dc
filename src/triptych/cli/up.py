"""`triptych up`: a whole deployment on this machine in one terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time

from triptych.cli.arguments import UP_TAKES_FROM_SERVE, said_options
from triptych.errors import ConfigError
from triptych.launch.args import ServerArgs
from triptych.launch.group import Group, ProcessStatus
from triptych.launch.plan import GroupPlan, plan_pool
from triptych.launch.probe import probe
from triptych.launch.sources import settle
from triptych.launch.telling import show

_ROLES = ("encoder", "denoiser", "decoder")


def run(args: argparse.Namespace) -> int:
    """Run the group until a signal or until it cannot work; returns the exit status."""
    settled = settle(said_options(args), os.environ, args.config, only=(*UP_TAKES_FROM_SERVE, "model_path"))
    for note in settled.notes:
        show(note, sys.stdout)
    options = settled.server_args()
    lists = instance_lists(args, options)
    plan = plan_pool(options, **lists, first_work_port=args.first_work_port)
    stop = threading.Event()
    group = Group(plan.processes, on_change=_show)

    def asked(*_: object) -> None:
        if stop.is_set():
            group.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, asked)
    with group:
        _await_ready(plan, group, stop)
        while not stop.wait(0.2) and not group.wait(0):
            pass
        if not group.failure:
            show("stopping", sys.stdout)
    group.check()
    return 0


def instance_lists(args: argparse.Namespace, options: ServerArgs) -> dict[str, list[list[int]]]:
    """The GPU lists of each role from ``--encoder-gpus`` and friends, ``--encoders`` and friends, or ``--replicas``.

    Raises `ConfigError` when they contradict each other or the device.
    """
    gpus = {role: getattr(args, f"{role}_gpus") for role in _ROLES}
    counts = {role: getattr(args, f"{role}s") for role in _ROLES}
    said_gpus = [f"--{role}-gpus" for role in _ROLES if gpus[role] is not None]
    said_counts = [f"--{role}s" for role in _ROLES if counts[role] is not None]
    if args.replicas and (said_gpus or said_counts):
        raise ConfigError(f"--replicas {args.replicas} and {(said_gpus + said_counts)[0]}: say one or the other")
    if said_gpus and options.device == "cpu":
        raise ConfigError(f"{said_gpus[0]} does not apply to --device cpu: say --encoders, --denoisers, --decoders")
    if said_counts and options.device != "cpu":
        raise ConfigError(f"{said_counts[0]} needs --device cpu; on GPUs say --encoder-gpus and so on")
    if args.replicas:
        return {"replica_gpus": [[gpu] for gpu in range(args.replicas)]}
    if said_gpus:
        missing = [f"--{role}-gpus" for role in _ROLES if gpus[role] is None]
        if missing:
            raise ConfigError(f"{missing[0]} is missing: with {said_gpus[0]} say the GPUs of every role")
        return {f"{role}_gpus": gpus[role] for role in _ROLES}
    return {f"{role}_gpus": [[0]] * (counts[role] or 1) for role in _ROLES}


def _await_ready(plan: GroupPlan, group: Group, stop: threading.Event) -> None:
    missing: str | None = None
    while not stop.wait(0.2) and not group.wait(0):
        now_missing = probe(plan.url)
        if now_missing is None:
            show(f"ready on {plan.url}", sys.stdout)
            return
        if now_missing and now_missing != missing:
            missing = now_missing
            show(f"waiting: {missing}", sys.stdout)


def _show(status: ProcessStatus) -> None:
    pid = f"pid {status.pid}" if status.pid else ""
    detail = f"  ({status.detail})" if status.detail else ""
    clock = time.strftime("%H:%M:%S")
    show(f"{clock}  {status.name:<12} {pid:<11} {status.address:<28} {status.state}{detail}", sys.stdout)
