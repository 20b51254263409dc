"""A denoising step on one device against the same step shared by several, and how far the results are apart.

Each layout is measured in a process group of its own (`triptych.bench.parallel_part`) that has a deadline: one that
hangs or dies is a row that says so, and the rest are measured all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from triptych.bench import synth
from triptych.bench.parallel_part import Failed, Line, Measured, Part
from triptych.config import parse_shape
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.parallelism import Parallelism

ALONE: Final = "alone"
DECODE: Final = "decode"
"""The layout of a decoder."""
_LAYOUT = re.compile(r"(cfg|ulysses|ring|tp)(\d*)")
_GRACE_SECONDS: Final = 2.0
"""What a process that is late has to write where it stands."""
_decode_line = msgspec.json.Decoder(Line).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    ranks: int
    layout: str
    guidance: bool | None
    """None for a decoder, and for a layout that failed as a whole."""
    seconds: float = 0.0
    """Median of a step, or of a decode."""
    ratio: float = 0.0
    """One device's time over this time."""
    equal: bool = False
    """Whether the result has the bytes of one device's."""
    error: float = 0.0
    """Relative error (Frobenius norm) against one device's result."""
    failed: str = ""
    """Why there is nothing more of this layout."""

    def __str__(self) -> str:
        head = f"{self.ranks} {self.layout}"
        if self.failed:
            return f"{head}: failed: {self.failed}"
        what = {None: "a decode", True: "a step, guidance on", False: "a step, guidance off"}[self.guidance]
        same = "equal bytes" if self.equal else f"error {self.error:.1e}"
        return f"{head}: {self.seconds * 1e3:.1f} ms {what}, {self.ratio:.2f}x one, {same}"


def run(part: Part, layouts: Sequence[tuple[int, str]], deadline: float, kept: Path | None = None) -> Iterator[Row]:
    """Measure one device and then each layout on so many, of decoders last; rows come as they are measured.

    ``part`` says everything but GPUs, layout and folder; ``deadline`` bounds each layout, in seconds. What one device
    does is kept in the folder ``kept``, and taken from there when it was measured before.
    """
    base: dict[bool | None, tuple[float, torch.Tensor]] = {}
    denoisers = [(gpus, name, Role.DENOISER) for gpus, name in layouts if name != DECODE]
    decoders = [(gpus, name, Role.DECODER) for gpus, name in layouts if name == DECODE]
    order = [(1, ALONE, Role.DENOISER), *denoisers] if denoisers else []
    order += [(1, ALONE, Role.DECODER), *decoders] if decoders else []
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        for gpus, name, role in order:
            own = Path(folder) / f"{role}-{gpus}-{name}"
            own.mkdir()
            try:
                parallel = Parallelism() if name == ALONE else layout(name, gpus)
            except ConfigError as error:
                yield Row(ranks=gpus, layout=name, guidance=None, failed=error.message)
                continue
            this = msgspec.structs.replace(part, gpus=gpus, parallel=parallel, role=role, folder=str(own))
            for line in _lines(this, deadline) if kept is None or name != ALONE else _known(this, deadline, kept):
                match line:
                    case Failed(reason=reason):
                        yield Row(ranks=gpus, layout=name, guidance=None, failed=reason)
                    case Measured():
                        result = load_file(line.result)["result"]
                        if name == ALONE:
                            base[line.guidance] = (line.seconds, result)
                        yield _row(gpus, name, line, result, base)


def _row(
    gpus: int, name: str, line: Measured, result: torch.Tensor, base: Mapping[bool | None, tuple[float, torch.Tensor]]
) -> Row:
    row = Row(ranks=gpus, layout=name, guidance=line.guidance, seconds=line.seconds)
    if line.guidance not in base:  # one device could not do it
        return row
    seconds, reference = base[line.guidance]
    return Row(
        ranks=gpus,
        layout=name,
        guidance=line.guidance,
        seconds=line.seconds,
        ratio=seconds / line.seconds,
        equal=torch.equal(result, reference),
        error=((result - reference).norm() / reference.norm()).item(),
    )


def _known(part: Part, deadline: float, kept: Path) -> Iterator[Line]:
    """The lines of a part like ``part``, of a run before or of this one."""
    own = kept / hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(part, folder=""))).hexdigest()[:16]
    file = own / "lines.json"
    if file.exists():
        yield from msgspec.json.decode(file.read_bytes(), type=list[Line])
        return
    own.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    for line in _lines(msgspec.structs.replace(part, folder=str(own)), deadline):
        lines.append(line)
        yield line
    if all(isinstance(line, Measured) for line in lines):
        file.write_bytes(msgspec.json.encode(lines))


def _lines(part: Part, deadline: float) -> Iterator[Line]:
    """What the process of ``part`` says, and a failure where it ends otherwise than well."""
    with tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(
            [sys.executable, "-m", "triptych.bench.parallel_part"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
        )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            child.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_SECONDS)
            _end(child)

        timer = threading.Timer(deadline, give_up)
        timer.start()
        failed = False
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
                stdin.write(msgspec.json.encode(part))
            with child.stdout as stdout:
                for text in stdout:
                    line = _decode_line(text)
                    failed = isinstance(line, Failed)
                    yield line
        finally:
            timer.cancel()
            if not late.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE_SECONDS)
            _end(child)
        complaints.seek(0)
        said = complaints.read().decode(errors="replace")
        if late.is_set():
            yield Failed(reason=f"not done within {deadline:.0f} s{where(said)}")
        elif child.returncode and not failed:
            yield Failed(reason=f"exit status {child.returncode}: {said.strip().rpartition(chr(10))[2]}")
        if late.is_set() or child.returncode:
            print(said[-4000:], file=sys.stderr, flush=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def where(said: str) -> str:
    """The innermost line of this package at which the main thread, which is written last, stands."""
    _, found, stacks = said.rpartition("most recent call first")
    place = re.search(r'File ".*?(triptych/[^"]+)", line (\d+) in (\w+)', stacks)
    return f", stands in {place[1]}:{place[2]} ({place[3]})" if found and place else ""


def layout(name: str, gpus: int) -> Parallelism:
    """The degrees that ``name`` says: ``auto``, ``decode``, or cfg, ulysses, ring, tp with + between, with degrees.

    One may be without: it gets what GPUs the others leave, and cfg two. Raises `ConfigError`.
    """
    if name == "auto":
        return Parallelism()
    if name == DECODE:
        return Parallelism(decoder_tp=gpus)
    degrees: dict[str, int] = {}
    open_ended: list[str] = []
    for part in name.split("+"):
        found = _LAYOUT.fullmatch(part)
        if found is None or found[1] in degrees or found[1] in open_ended:
            raise ConfigError(f"layouts={name!r}: {part!r} is none of auto, cfg, ulysses, ring, tp with its degree")
        if found[2] or found[1] == "cfg":
            degrees[found[1]] = int(found[2] or 2)
        else:
            open_ended.append(found[1])
    if len(open_ended) > 1:
        raise ConfigError(f"layouts={name!r}: only one of {', '.join(open_ended)} can do without a degree")
    rest = gpus
    for degree in degrees.values():
        rest //= max(1, degree)
    for part in open_ended:
        degrees[part] = rest
    said: dict[str, Any] = {"cfg": 1, **degrees}
    wish = Parallelism(**said)
    wish.check(gpus)
    return wish


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triptych bench parallel", allow_abbrev=False)
    parser.add_argument("model", help=f"model folder, tiny, or a size: {', '.join(sorted(synth.SIZES))}")
    parser.add_argument("--shape", default="832x480x81", help="width x height x frames (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a request (default: %(default)s)")
    parser.add_argument("--num-gpus", default="2", help="how many, or several numbers with commas (default: 2)")
    parser.add_argument(
        "--layouts",
        default="auto,ulysses",
        help="auto; cfg, ulysses, ring, tp with + between and degrees, e.g. cfg2+ulysses4; or decode, for a decoder "
        "(default: %(default)s)",
    )
    parser.add_argument("--profile", choices=("stock", "lossless", "fast"), default="stock")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for each layout (default: 300)")
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="keep what one device does there, and do not measure it again"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser


def main(argv: Sequence[str]) -> int:
    """``triptych bench parallel MODEL``; 1 when a layout failed."""
    args = _parser().parse_args(argv)
    wanted = _wanted(args.num_gpus, args.layouts)
    shape = parse_shape("--shape", args.shape)
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        model = args.model
        if model in synth.SIZES:
            dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
            shared = ("transformer", "transformer_2", "vae")
            synth.write(model, Path(folder), torch.device(args.device), dtype, weights=shared)
            if args.device == "cuda":
                torch.cuda.empty_cache()
            model = folder
        part = Part(
            model=model,
            width=shape.width,
            height=shape.height,
            frames=shape.frames,
            steps=args.steps,
            profile=args.profile,
            device=args.device,
            gpus=1,
            parallel=Parallelism(),
            folder=folder,
        )
        rows: list[Row] = []
        for row in run(part, wanted, args.deadline, args.base):
            rows.append(row)
            print(row, flush=True)
            if args.json is not None:  # after each row: what was measured outlives what breaks off
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    _print(rows, f"{args.model}, {args.shape}, profile {args.profile}, torch {torch.__version__}")
    return 1 if any(row.failed for row in rows) else 0


def _wanted(gpus: str, layouts: str) -> list[tuple[int, str]]:
    """Each layout on each number of GPUs; 1 is always measured."""
    try:
        counts = [int(part) for part in gpus.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(f"num-gpus={gpus!r}: must be whole numbers of 1 or more, with commas between")
    names = layouts.split(",")
    for name in names:
        if name not in ("auto", DECODE) and not all(_LAYOUT.fullmatch(part) for part in name.split("+")):
            raise ConfigError(f"layouts={name!r}: must be auto, decode, or of cfg, ulysses, ring, tp with + between")
    return [(count, name) for count in counts if count > 1 for name in names]


def _print(rows: Sequence[Row], title: str) -> None:
    table = Table(title=title)
    for column in ("ranks", "layout", "guidance", "ms", "x one", "equal bytes", "relative error"):
        table.add_column(column)
    for row in rows:
        if row.failed:
            table.add_row(str(row.ranks), row.layout, "", "failed", "", "", "")
            continue
        table.add_row(
            str(row.ranks),
            row.layout,
            {None: "decode", True: "on", False: "off"}[row.guidance],
            f"{row.seconds * 1e3:.1f}",
            f"{row.ratio:.2f}",
            "yes" if row.equal else "no",
            f"{row.error:.1e}",
        )
    Console().print(table)
    for row in rows:
        if row.failed:
            print(row)
