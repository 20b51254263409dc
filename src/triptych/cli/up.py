"""`triptych up`: a whole deployment on this machine in one terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from typing import cast

from triptych.cli.arguments import UP_TAKES_FROM_SERVE, said_options
from triptych.errors import ConfigError
from triptych.launch.args import ServerArgs
from triptych.launch.group import Group, ProcessStatus
from triptych.launch.plan import KINDS, GroupPlan, PoolGpus, plan_pool
from triptych.launch.probe import probe
from triptych.launch.sources import settle
from triptych.launch.telling import show

_KINDS = {name: key for key, (name, _) in KINDS.items() if key != "replica_gpus"}
"""Of instances that a list of GPUs, or a count, can be given for."""


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


def instance_lists(args: argparse.Namespace, options: ServerArgs) -> PoolGpus:
    """The GPU lists of each kind from ``--encoder-gpus`` and friends, ``--encoders`` and friends, or ``--replicas``.

    Raises `ConfigError` when they contradict each other or the device.
    """
    gpus = {kind: getattr(args, key) for kind, key in _KINDS.items()}
    counts = {kind: getattr(args, f"{kind.replace('-', '_')}s") for kind in _KINDS}
    said_gpus = [f"--{kind}-gpus" for kind in _KINDS if gpus[kind] is not None]
    said_counts = [f"--{kind}s" for kind in _KINDS if counts[kind] is not None]
    if args.replicas and (said_gpus or said_counts):
        raise ConfigError(f"--replicas {args.replicas} and {(said_gpus + said_counts)[0]}: say one or the other")
    if said_gpus and options.device == "cpu":
        raise ConfigError(f"{said_gpus[0]} does not apply to --device cpu: say --encoders, --denoisers, --decoders")
    if said_counts and options.device != "cpu":
        raise ConfigError(f"{said_counts[0]} needs --device cpu; on GPUs say --encoder-gpus and so on")
    if args.replicas:
        return {"replica_gpus": [[gpu] for gpu in range(args.replicas)]}
    shared = gpus["encoder-decoder"] is not None or counts["encoder-decoder"] is not None
    needed = ("denoiser",) if shared else ("encoder", "denoiser", "decoder")
    if said_gpus:
        missing = [f"--{kind}-gpus" for kind in needed if gpus[kind] is None]
        if missing:
            raise ConfigError(f"{missing[0]} is missing: with {said_gpus[0]} say the GPUs of every role")
    else:
        gpus = {kind: [[0]] * (counts[kind] or int(kind in needed)) for kind in _KINDS}
    return cast(PoolGpus, {_KINDS[kind]: lists for kind, lists in gpus.items() if lists})


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
