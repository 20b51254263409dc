"""`triptych demo`: a prompt becomes a video through a server and three role processes, each stage with its figures."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.cli.progress import JobBar
from triptych.client import Client
from triptych.errors import TriptychError
from triptych.ids import ROLES
from triptych.launch.args import ServerArgs
from triptych.launch.pool import launch_pool_disagg_server
from triptych.launch.ports import free_ports

PROMPT = "a large red circle moves to the right on a blue background"
START_SECONDS = 300.0


def run(args: argparse.Namespace) -> int:
    """Start, generate, show, stop; the last line names the video."""
    console = Console()
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    scheduler, *_, port = free_ports(5)
    with tempfile.TemporaryDirectory() as media:
        options = ServerArgs.from_kwargs(
            model_path="tiny",
            device="cpu",
            port=port,
            scheduler_port=scheduler,
            disagg_transfer="mooncake",
            output_dir=Path(media) / "outputs",
        )
        with launch_pool_disagg_server(
            options,
            encoder_gpus=[[0]],
            denoiser_gpus=[[0]],
            decoder_gpus=[[0]],
            output=lambda name, line: lines.append(f"[{name}] {line}"),
        ) as pool:
            try:
                with console.status("starting a server, an encoder, a denoiser and a decoder"):
                    pool.wait_ready(START_SECONDS)
                for status in pool.statuses():
                    console.print(f"{status.name:<12} pid {status.pid:<8} {status.address}", highlight=False)
                with Client(pool.url) as client, JobBar() as bar:
                    result = client.generate(args.prompt or PROMPT, path=path, on_progress=bar, seed=1)
            except TriptychError:
                print(*lines[-40:], sep="\n", file=sys.stderr)
                raise
    show_timings(result.timings, console)
    print(f"{result.seconds:.1f} s from prompt to file\n{path}")
    return 0


def show_timings(timings: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One table of the stages of a request and one of the handoffs between them."""
    stages = Table(title="stages", title_justify="left")
    handoffs = Table(title="handoffs", title_justify="left")
    for column in ("stage", "waited s", "computed s", "staged or encoded s"):
        stages.add_column(column, justify="left" if column == "stage" else "right")
    for column in ("from", "to", "seconds", "bytes", "plane"):
        handoffs.add_column(column, justify="right" if column in ("seconds", "bytes") else "left")
    before = {role.next: role for role in ROLES}
    for timing in timings:
        role = timing["role"]
        stages.add_row(role, f"{timing['waiting']:.3f}", f"{timing['compute']:.3f}", f"{timing['staging']:.4f}")
        if timing["plane"]:
            handoffs.add_row(
                before[role], role, f"{timing['pulling']:.4f}", f"{timing['pulled_bytes']:,}", timing["plane"]
            )
    console.print(stages)
    console.print(handoffs)
