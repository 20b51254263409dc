"""Start and peak memory of each role alone against the whole model in one process, each in a fresh process of its own.

A named size is measured with random weights, made on the device: nothing is downloaded, and nothing large is written.
How long a start takes is measured with a folder's own.
The real pipeline runs one short request; how many steps it has does not change its peak.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from triptych.bench import synth
from triptych.bench.memory_part import Part, Usage, hand_over_zeros
from triptych.config import parse_shape
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.launch.device import detect_device
from triptych.launch.options import BY_NAME

WHOLE = "whole"
"""The row of all roles in one process."""

_OPTIONS = ("dtype", "profile", "quant", "offload", "vae_tiling", "vae_slicing")
"""Serving options whose effect can be measured."""


def rows(part: Part, wanted: Sequence[str]) -> Iterator[tuple[str, Usage]]:
    """Measure the wanted rows, `WHOLE` and roles; those come as they are measured.

    A role works on what the ones before it made; those of them that are not wanted hand over zeros, which takes no
    weights. Where their shapes cannot be had so, they run too, without a row.
    """
    last = max((ROLES.index(Role(name)) for name in wanted if name != WHOLE), default=-1)
    if WHOLE in wanted:
        yield WHOLE, _measured(part, ROLES)
    with tempfile.TemporaryDirectory(prefix="triptych-handoffs-") as folder:
        part = msgspec.structs.replace(part, handoffs=folder)
        unwanted = tuple(role for role in ROLES[: last + 1] if role not in wanted)
        left_out = unwanted and hand_over_zeros(part, ROLES[:last])
        for role in ROLES[: last + 1]:
            if role in wanted or not left_out:
                usage = _measured(part, (role,))
                if role in wanted:
                    yield role, usage


def _measured(part: Part, roles: tuple[Role, ...]) -> Usage:
    with tempfile.TemporaryDirectory(prefix="triptych-handoffs-") as folder:
        part = msgspec.structs.replace(
            part,
            roles=roles,
            handoffs=part.handoffs or folder,
            quant={role: kind for role, kind in part.quant.items() if role in roles and kind != "none"},
            offload={role: kind for role, kind in part.offload.items() if role in roles and kind != "none"},
        )
        child = subprocess.run(
            [sys.executable, "-m", "triptych.bench.memory_part"],
            input=msgspec.json.encode(part),
            capture_output=True,
            check=False,
        )
    if child.returncode != 0:
        last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"the {', '.join(roles)} cannot be measured: {last}")
    return msgspec.json.decode(child.stdout, type=Usage)


def print_rows(found: Sequence[tuple[str, Usage]], title: str) -> None:
    """The rows as a table on standard output; GB are 10^9 bytes."""
    table = Table(title=title)
    table.add_column("in one process")
    for column in ("ready in s", "loaded GB", "peak allocated GB", "peak reserved GB", "of whole", "host RSS GB"):
        table.add_column(column, justify="right")
    whole = next((usage.allocated for name, usage in found if name == WHOLE), None)
    for name, usage in found:
        share = "" if whole is None or usage.allocated is None else f"{usage.allocated / whole:.0%}"
        ready = "n/a" if usage.seconds is None else f"{usage.seconds:.1f}"
        sizes = (usage.loaded, usage.allocated, usage.reserved)
        table.add_row(name, ready, *map(_gigabytes, sizes), share, _gigabytes(usage.resident))
    Console().print(table)


def _gigabytes(size: int | None) -> str:
    return "n/a" if size is None else f"{size / 1e9:.1f}"


def main(argv: Sequence[str]) -> int:
    """``triptych bench memory CONFIG``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="triptych bench memory", allow_abbrev=False)
    parser.add_argument("config", help=f"{', '.join(sorted(synth.SIZES))}; or a model folder, Hub id, embedded model")
    names = ",".join((WHOLE, *ROLES))
    parser.add_argument("--roles", default=names, help="rows to measure, with commas between (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps (default: %(default)s)")
    parser.add_argument("--shape", help="width x height x frames, e.g. 832x480x81 (default: the model's)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees a GPU")
    for name in _OPTIONS:
        option = BY_NAME[name]
        kind: dict[str, Any] = {"action": "store_true"} if option.is_switch else {"metavar": option.metavar}
        parser.add_argument(option.flag, default=argparse.SUPPRESS, help=option.help, **kind)
    args = parser.parse_args(argv)
    wanted = args.roles.split(",")
    for name in wanted:
        if name not in (WHOLE, *ROLES):
            raise ConfigError(f"roles={args.roles!r}: {name!r} is none of {names}")
    said = {name: BY_NAME[name].read(BY_NAME[name].flag, getattr(args, name)) for name in _OPTIONS if name in args}
    with tempfile.TemporaryDirectory(prefix="triptych-size-") as folder:
        if args.config in synth.SIZES:
            synth.write_configs(args.config, Path(folder))
        part = Part(
            folder=folder if args.config in synth.SIZES else args.config,
            size=args.config if args.config in synth.SIZES else None,
            roles=ROLES,
            handoffs="",
            params=_params(args),
            device=args.device or detect_device(),
            **said,
        )
        found: list[tuple[str, Usage]] = []
        for name, usage in rows(part, wanted):
            found.append((name, usage))
            print(f"{name}: peak allocated {_gigabytes(usage.allocated)} GB", flush=True)
    print_rows(found, f"{args.config}, {args.shape or 'its own shape'}, {part.device}")
    return 0


def _params(args: argparse.Namespace) -> dict[str, int]:
    if args.steps < 1:
        raise ConfigError(f"steps={args.steps}: must be 1 or more")
    params: dict[str, int] = {"num_inference_steps": args.steps}
    if args.shape is not None:
        shape = parse_shape("--shape", args.shape)
        params |= {"width": shape.width, "height": shape.height, "num_frames": shape.frames}
    return params
