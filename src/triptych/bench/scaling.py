"""The whole comparison of several GPUs, as one list of runs of the other benchmarks on one machine.

Each run is a process with a deadline whose rows go to a file of its own in the folder; a run whose file is complete is
not done again, so the list can be broken off and taken up, or bounded by ``--budget``. What a run prints comes through
as it is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from triptych.bench import synth
from triptych.bench.scaling_report import report
from triptych.errors import ConfigError
from triptych.launch.device import detect_device

COUNTS: Final = (1, 2, 4, 8)
_LAYOUTS: Final = {
    2: ("cfg", "ulysses", "ring"),
    4: ("cfg+ulysses", "cfg+ring", "ulysses", "ring", "ulysses2+ring2"),
    8: ("cfg+ulysses", "cfg+ring", "cfg+ulysses2+ring2", "ulysses4+ring2", "ring"),
}
"""The layouts of each number of GPUs that are compared; those that a model cannot have become rows that say why."""
_SPREAD: Final = {2: ("tp",), 4: ("cfg+tp", "tp"), 8: ("cfg+tp", "tp")}
"""Those that spread the weights, which only unchanged layers can be: they are compared under profile stock."""
_FLAGS: Final = {
    2: ("--encoder-decoder-gpus", "--denoiser-gpus"),
    3: ("--encoder-gpus", "--denoiser-gpus", "--decoder-gpus"),
}
"""Of arrangements of two kinds of instances and of three."""
_LAYOUT_SECONDS: Final = 150.0
_SERVE_SECONDS: Final = 900.0
_LEAST_SECONDS: Final = 60.0
"""What must be left of the budget for a run to be begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of a benchmark. ``name`` is that of its file."""

    name: str
    words: tuple[str, ...]
    """What comes after ``triptych``."""
    deadline: float
    """Seconds."""
    leaves: str = ""
    """File that later runs need; where it is gone, as on another machine, the run is done again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is compared."""

    size: str
    """Of the model, whose checkpoint with random weights is written once."""
    model: str
    """Folder of that, or a model."""
    gpus: int
    device: str
    shape: str
    steps: tuple[int, ...]
    """Of the requests that are served."""
    profile: str
    bursts: str
    poisson: tuple[str, ...]
    """Words of `triptych bench serve` for requests at Poisson intervals after the bursts; none for no such requests."""
    base: str
    """Folder for what one GPU does, so that it is measured once for all numbers of GPUs."""


def runs(plan: Plan) -> Iterator[Run]:
    """Everything, what tells most first."""
    device = ("--device", plan.device)
    if plan.size in synth.SIZES:
        yield Run(
            name="checkpoint",
            words=("synth", plan.size, "--out", plan.model, *device),
            deadline=300.0,
            leaves=f"{plan.model}/model_index.json",
        )
    counts = [count for count in COUNTS if 1 < count <= plan.gpus]
    for count in counts:
        yield _sharing(plan, f"step-{count}", plan.profile, (count,), _LAYOUTS[count])
    for count in counts:
        yield _sharing(plan, f"spread-{count}", "stock", (count,), _SPREAD[count])
    if counts:
        yield _sharing(plan, "decode", plan.profile, counts, ("decode",))
    for steps in plan.steps:
        for name, words in deployments(plan.gpus).items():
            yield Run(name=f"serve-{steps}-{name}", words=_serving(plan, steps, words), deadline=_SERVE_SECONDS)


def _sharing(plan: Plan, name: str, profile: str, counts: Sequence[int], layouts: Sequence[str]) -> Run:
    """Layouts on numbers of GPUs against one."""
    what = ("bench", "parallel", plan.model, "--shape", plan.shape, "--device", plan.device, "--profile", profile)
    how = ("--num-gpus", ",".join(map(str, counts)), "--layouts", ",".join(layouts), "--base", plan.base)
    return Run(
        name=name,
        words=(*what, *how, "--deadline", str(_LAYOUT_SECONDS)),
        deadline=_LAYOUT_SECONDS * (len(layouts) * len(counts) + 1) + 10,
    )


def deployments(gpus: int) -> dict[str, tuple[str, ...]]:
    """Arrangements of so many GPUs by name, as words of ``triptych bench serve``; the last one is replicas on them all.

    Encoder and decoder are light, so they share a GPU where there are few, or are one instance.
    """
    match gpus:
        case 8:
            lists = {"three-pairs": ("0", "1,2;3,4;5,6", "7"), "one-of-four": ("0", "1,2,3,4")}
        case 4:
            lists = {"one-pair": ("0", "1,2", "3"), "one-of-three": ("0", "1,2,3")}
        case 2:
            lists = {"apart": ("0", "1", "0"), "both": ("0", "1"), "pair": ("0", "0,1", "1")}
        case 1:
            lists = {"one": ("0", "0", "0")}
        case _:
            raise ConfigError(f"num-gpus={gpus}: must be one of {', '.join(map(str, COUNTS))}")
    every = ";".join(map(str, range(gpus)))
    words = {name: tuple(itertools.chain(*zip(_FLAGS[len(said)], said, strict=True))) for name, said in lists.items()}
    return {**words, "replicas": ("--denoiser-gpus", every, "--no-split", "--baseline", "replicas")}


def _serving(plan: Plan, steps: int, words: Sequence[str]) -> tuple[str, ...]:
    options = {"device": plan.device, "profile": plan.profile}
    if plan.profile != "stock":
        options["warmup"] = plan.shape
    said = tuple(word for name, value in options.items() for word in ("--option", f"{name}={value}"))
    load = ("--shape", plan.shape, "--steps", str(steps), "--bursts", plan.bursts, *plan.poisson)
    return ("bench", "serve", plan.model, *words, *said, *load)


class Ledger:
    """Which runs of a folder are done: one line each, with exit status and seconds."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder / "runs.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.ended: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in map(json.loads, lines)}

    def rows(self, run: Run) -> Path:
        """Where the rows of ``run`` go."""
        return self._folder / f"{run.name}.json"

    def end(self, run: Run, status: int | None, seconds: float) -> None:
        """Write down how ``run`` ended; a ``status`` of None: by its deadline."""
        entry = {**asdict(run), "status": status, "seconds": round(seconds, 1)}
        self.ended[run.name] = entry
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def carry_out(run: Run, ledger: Ledger, left: float = float("inf")) -> bool:
    """Do one run and write it down, unless it was cut short because only ``left`` seconds were left: whether it was."""
    words = run.words if run.words[0] == "synth" else (*run.words, "--json", str(ledger.rows(run)))
    print(f"== {run.name}: triptych {' '.join(words)}", flush=True)
    begun = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "triptych.cli.main", *words], start_new_session=True)
    try:
        status: int | None = child.wait(min(run.deadline, left))
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(child)
    seconds = time.monotonic() - begun
    ended = status is not None or run.deadline <= left
    if ended:
        ledger.end(run, status, seconds)
    ending = f"exit status {status}" if status is not None else "not done in time"
    print(f"== {run.name}: {ending}, {seconds:.1f} s", flush=True)
    return ended


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a run: by asking, so that it ends its own children, and then by force."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main(argv: Sequence[str]) -> int:
    """``triptych bench scaling SIZE --out FOLDER``; 1 when something has failed or is left to do."""
    parser = argparse.ArgumentParser(
        prog="triptych bench scaling", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("size", help=f"a model, or a size: {', '.join(sorted(synth.SIZES))}")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where rows and the list are kept")
    parser.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="where random weights are written (default: within --out)"
    )
    parser.add_argument("--num-gpus", type=int, default=2, help="GPUs of the machine (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees a GPU")
    parser.add_argument("--shape", default="832x480x81", help="width x height x frames (default: %(default)s)")
    parser.add_argument("--steps", default="50,4", help="of requests that are served (default: %(default)s)")
    parser.add_argument("--bursts", default="1,2,4,8", help="simultaneous requests (default: %(default)s)")
    parser.add_argument("--requests", type=int, help="Poisson arrivals after the bursts (default: none)")
    parser.add_argument("--rate", type=float, default=1.0, help="of those a second (default: %(default)s)")
    parser.add_argument("--profile", choices=("stock", "lossless", "fast"), default="lossless")
    parser.add_argument("--only", default="", metavar="NAMES", help="runs whose names begin so, with commas between")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds that all may take")
    parser.add_argument("--report", action="store_true", help="do nothing but print what is measured as Markdown")
    parser.add_argument("--again", action="store_true", help="do again what has failed")
    args = parser.parse_args(argv)
    if args.report:
        print("\n".join(report(args.out)))
        return 0
    folder = args.checkpoints or args.out / "checkpoints"
    model = str(folder / args.size) if args.size in synth.SIZES else args.size
    try:
        steps = tuple(int(part) for part in args.steps.split(","))
    except ValueError:
        raise ConfigError(f"--steps {args.steps!r}: must be whole numbers with commas between") from None
    # Times of one GPU are those of this machine, so they are not kept with the rows.
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as base:
        plan = Plan(
            size=args.size,
            model=model,
            gpus=args.num_gpus,
            device=args.device or detect_device(),
            shape=args.shape,
            steps=steps,
            profile=args.profile,
            bursts=args.bursts,
            poisson=("--requests", str(args.requests), "--rate", str(args.rate)) if args.requests else (),
            base=base,
        )
        deployments(plan.gpus)  # what is impossible is said before anything starts
        return _all(list(runs(plan)), Ledger(args.out), args)


def _all(wanted: Sequence[Run], ledger: Ledger, args: argparse.Namespace) -> int:
    begun, left = time.monotonic(), 0
    chosen = tuple(name for name in args.only.split(",") if name)
    for run in wanted:
        if chosen and not run.name.startswith(chosen):
            continue
        known = ledger.ended.get(run.name)
        if (
            known is not None
            and (not run.leaves or Path(run.leaves).exists())
            and (known["status"] == 0 or not args.again)
        ):
            print(f"== {run.name}: done before, exit status {known['status']}", flush=True)
            continue
        seconds = args.budget - (time.monotonic() - begun)
        if seconds < _LEAST_SECONDS or not carry_out(run, ledger, seconds):
            left += 1
    print("\n".join(report(args.out)))
    failed = [name for name, entry in ledger.ended.items() if entry["status"] != 0]
    print(f"{len(ledger.ended)} runs ended, {len(failed)} of them with failures; {left} are left to do", flush=True)
    return 1 if failed or left else 0
