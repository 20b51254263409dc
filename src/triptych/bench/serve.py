"""Serving over HTTP, as clients see it: bursts and Poisson arrivals, against replicas and stock Diffusers.

Every arrangement gets the same requests on the same GPUs, one arrangement after the other: ``split``, the roles in
processes of their own; ``replicas``, one instance of all roles on each GPU that those use; ``stock``, one request at a
time in a process of stock Diffusers. What a server needs before it is ready (loading, warm-up) is not counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Console
from rich.table import Table

from triptych.bench.arrangement import Arrangement, Running, running
from triptych.bench.attainment import Attained, Objectives
from triptych.bench.handoffs import Handoff, handoff_text, handoffs
from triptych.bench.load import Load, Measured
from triptych.bench.turnover import Turnovers, idle_text
from triptych.client import Client
from triptych.config import Shape, parse_shape
from triptych.errors import ConfigError
from triptych.ids import ROLES
from triptych.launch.plan import PoolGpus
from triptych.launch.readers import read_gpu_lists

BASELINES = ("replicas", "stock")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One load on one arrangement. Latencies in seconds, from sending to the last byte of the file."""

    arrangement: str
    gpus: int
    load: str
    sent: int
    done: int
    qps: float
    p50: float
    p95: float
    p99: float
    attained: tuple[Attained, ...] = ()
    """What share ended within each limit."""
    live: float
    """Mean number of live requests as the server counted them; 0 for stock, which counts none."""
    expected_live: float
    """The same by Little's law from the clients' clocks."""
    little_holds: bool
    failures: tuple[str, ...]
    stages: Mapping[str, float]
    """Mean seconds of each stage's computation, and of writing the file."""
    handoffs: Mapping[str, Handoff] = field(default_factory=dict[str, Handoff])
    """What lies between the stages, by edge."""
    turnovers: int | None = 0
    """How often a denoiser went from one request to one that was queued already; None: the server does not say."""
    idle: float | None = 0.0
    """Mean seconds that it stood still then; None: the server does not say."""
    loads: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that each instance took to load its model and to warm up."""

    @property
    def sound(self) -> bool:
        """Whether the row can be believed: everything that was sent gave a file, and Little's law holds."""
        return self.done == self.sent and self.little_holds


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is sent."""

    bursts: tuple[int, ...]
    fields: Mapping[str, Any]
    requests: int
    """Poisson arrivals; 0: none."""
    rate: float
    open_fields: Mapping[str, Any]
    """Fields of the Poisson requests, usually of a smaller shape."""
    objectives: Objectives = field(default_factory=Objectives)
    """Within which time requests should end."""


def measure(url: str, name: str, gpus: int, plan: Plan, api_key: str | None = None) -> Iterator[Row]:
    """One row for each load on the server at ``url``, after requests that are not counted."""
    with Client(url, api_key=api_key) as client:
        kind = cast(Literal["video", "image"], client.models()["data"][0]["output"])
        instances = len(client.server_info()["instances"])
    short = {"num_inference_steps": 3} if "num_inference_steps" in plan.fields else {}
    for fields in (plan.fields, plan.open_fields) if plan.requests else (plan.fields,):
        first = Load(url, {**fields, **short}, kind=kind, api_key=api_key).burst(instances)
        if first.failures:
            raise ConfigError(f"{name}: the first request failed: {first.failures[0]}")
        one = Load(url, fields, kind=kind, api_key=api_key)
        plan.objectives.prepare(fields, lambda one=one: one.burst(1))
    load = Load(url, plan.fields, kind=kind, api_key=api_key)
    before = Turnovers.read(url, api_key)
    for count in plan.bursts:
        measured = load.burst(count)
        after = Turnovers.read(url, api_key)
        attained = plan.objectives.judge(plan.fields, measured)
        yield _row(name, gpus, f"burst of {count}", measured, after - before, attained)
        before = after
    if plan.requests:
        load = Load(url, plan.open_fields, kind=kind, api_key=api_key)
        measured = load.poisson(plan.requests, plan.rate)
        attained = plan.objectives.judge(plan.open_fields, measured)
        yield _row(name, gpus, f"Poisson {plan.rate:g}/s", measured, Turnovers.read(url, api_key) - before, attained)


def _row(name: str, gpus: int, load: str, measured: Measured, turned: Turnovers, attained: tuple[Attained, ...]) -> Row:
    return Row(
        arrangement=name,
        gpus=gpus,
        load=load,
        sent=len(measured.samples),
        done=len(measured.done),
        qps=measured.qps,
        p50=measured.percentile(0.50),
        p95=measured.percentile(0.95),
        p99=measured.percentile(0.99),
        attained=attained,
        live=measured.live,
        expected_live=measured.expected_live,
        little_holds=measured.little_holds,
        failures=tuple(measured.failures),
        stages=_stages(measured),
        handoffs=handoffs([sample.timings for sample in measured.done]),
        turnovers=turned.count,
        idle=turned.mean,
    )


def _stages(measured: Measured) -> dict[str, float]:
    """Mean seconds a request: computing in each role, and writing the file."""
    sums: dict[str, float] = {}
    for sample in measured.done:
        for timing in sample.timings:
            sums[timing["role"]] = sums.get(timing["role"], 0.0) + timing["compute"]
            if timing["role"] == "decoder":
                sums["file"] = sums.get("file", 0.0) + timing["staging"]
    return {name: seconds / len(measured.done) for name, seconds in sums.items()}


def _stock_row(arrangement: Arrangement, plan: Plan, repeats: int) -> Row:
    from triptych.bench.stock import measure_stock

    seconds = sorted(measure_stock(arrangement, plan.fields, repeats))
    middle = seconds[len(seconds) // 2]
    return Row(
        arrangement="stock", gpus=1, load="one at a time", sent=len(seconds), done=len(seconds), qps=1 / middle,
        p50=middle, p95=seconds[-1], p99=seconds[-1], live=0.0, expected_live=0.0, little_holds=True, failures=(),
        stages={},
    )  # fmt: skip


def run(
    arrangement: Arrangement, baselines: Sequence[str], plan: Plan, stock_repeats: int, *, split: bool = True
) -> Iterator[Row]:
    """All rows: of stock, of the roles if they are wanted ``split``, then of replicas, which find compiled what the
    roles have compiled."""
    if "stock" in baselines:
        yield _stock_row(arrangement, plan, stock_repeats)
    if split:
        with running(arrangement, replicas=False) as group:
            yield from _measured(group, "split", arrangement, plan)
    if "replicas" in baselines:
        with running(arrangement, replicas=True) as group:
            yield from _measured(group, "replicas", arrangement, plan)


def _measured(group: Running, name: str, arrangement: Arrangement, plan: Plan) -> Iterator[Row]:
    say(group)
    for row in measure(group.url, name, arrangement.gpu_count, plan):
        yield replace(row, loads=group.loads)


def say(group: Running) -> None:
    """Print how the group started and what its instances hold in memory."""
    for note in group.notes:
        print(note, flush=True)
    with Client(group.url) as client:
        for instance in client.server_info()["instances"]:
            nbytes = instance["device_bytes"] or instance["resident_bytes"]
            print(f"memory of {','.join(instance['roles'])}: {nbytes / (1 << 30):.2f} GiB", flush=True)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows as a table, then every failure."""
    table = Table(title="requests over HTTP; seconds from sending to the last byte")
    in_time = ("in time",) if any(row.attained for row in rows) else ()
    figures = ("QPS", "P50", "P95", "P99", *in_time, "live", "rate x time", "idle ms")
    for heading in ("arrangement", "GPUs", "load", "done", *figures, "stages"):
        table.add_column(heading, justify="left" if heading in ("arrangement", "load", "stages") else "right")
    for row in rows:
        table.add_row(
            row.arrangement,
            str(row.gpus),
            row.load,
            f"{row.done}/{row.sent}",
            f"{row.qps:.4g}",
            f"{row.p50:.3f}",
            f"{row.p95:.3f}",
            f"{row.p99:.3f}",
            *("\n".join(map(str, row.attained)) for _ in in_time),
            f"{row.live:.2f}",
            f"{row.expected_live:.2f}" + ("" if row.little_holds else " (!)"),
            idle_text(row.turnovers, row.idle),
            ", ".join(f"{name} {seconds:.3f}" for name, seconds in row.stages.items()),
        )
    console.print(table)
    if any(row.turnovers is None for row in rows):
        console.print("idle ms: the server's metrics say nothing of turnovers of denoisers, so it was not measured")
    for row in rows:
        if row.handoffs:
            console.print(
                f"{row.arrangement}, {row.load}: handoffs, ms of staging + pull: {handoff_text(row.handoffs)}"
            )
        for reason in row.failures:
            console.print(f"{row.arrangement}, {row.load}: failed: {reason}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triptych bench serve", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", nargs="?", default="tiny", help="model to serve (default: %(default)s)")
    parser.add_argument("--server", metavar="URL", help="measure this running server and start none")
    parser.add_argument("--api-key", metavar="KEY", help="key of that server")
    parser.add_argument("--baseline", default="", metavar="NAMES", help="replicas, stock, or both with a comma")
    parser.add_argument("--no-split", action="store_true", help="measure the baselines alone, on the same GPUs")
    for role in ROLES:
        parser.add_argument(
            f"--{role}-gpus", metavar="LISTS",
            help="GPUs, ';' between instances and ',' within one; on the CPU only how many counts (default: 0)",
        )  # fmt: skip
    parser.add_argument(
        "--encoder-decoder-gpus", metavar="LISTS", help="of instances that encode and decode (default: none)"
    )
    parser.add_argument("--bursts", default="1,2,4,8", help="simultaneous requests (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.0, help="Poisson arrivals a second (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=0, help="Poisson arrivals in all (default: none)")
    parser.add_argument("--shape", metavar="WxHxF", help="pixels and frames (default: the model's)")
    parser.add_argument("--steps", type=int, help="denoising steps (default: the model's)")
    parser.add_argument("--open-shape", metavar="WxHxF", help="shape of the Poisson requests (default: --shape)")
    parser.add_argument("--open-steps", type=int, help="steps of the Poisson requests (default: --steps)")
    parser.add_argument(
        "--slo", default="", metavar="LIMITS",
        help="say what share of the requests ended within these seconds, or these multiples of what one takes alone on "
        "the first arrangement: e.g. 5 or 2x,4x (default: none)",
    )  # fmt: skip
    parser.add_argument("--stock-repeats", type=int, default=1, help="counted stock requests (default: %(default)s)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="an option of `triptych serve` for every process, e.g. profile=lossless or batching=true; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser


def main(argv: Sequence[str]) -> int:
    """``triptych bench serve``: measure and print; 1 when a request failed or Little's law does not hold."""
    args = _parser().parse_args(argv)
    baselines = tuple(name for name in args.baseline.split(",") if name)
    for name in baselines:
        if name not in BASELINES:
            raise ConfigError(f"--baseline {args.baseline!r}: {name!r} is none of {', '.join(BASELINES)}")
    if args.no_split and not baselines:
        raise ConfigError("--no-split leaves nothing to measure without --baseline")
    plan = _plan(args)
    if args.server is not None:
        if baselines or args.option:
            raise ConfigError("--server starts nothing, so neither --baseline nor --option applies")
        measured = measure(args.server, "server", 0, plan, args.api_key)
    else:
        if "stock" in baselines and args.shape is None:
            raise ConfigError("--baseline stock: needs --shape, as stock Diffusers' own default is not the model's")
        arrangement = Arrangement(model=args.model, gpus=_gpus(args), options=_options(args.option))
        measured = run(arrangement, baselines, plan, args.stock_repeats, split=not args.no_split)
    rows: list[Row] = []
    for row in measured:
        rows.append(row)
        print(f"{row.arrangement}, {row.load}: {row.done} of {row.sent} done, P50 {row.p50:.3f} s", flush=True)
        if args.json is not None:  # after each row: what was measured outlives what breaks off
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    show(rows, Console(width=180))
    return 0 if all(row.sound for row in rows) else 1


def _gpus(args: argparse.Namespace) -> PoolGpus:
    alone = "" if args.encoder_decoder_gpus else "0"
    defaults = {"encoder_gpus": alone, "denoiser_gpus": "0", "decoder_gpus": alone, "encoder_decoder_gpus": ""}
    said = {key: getattr(args, key) or default for key, default in defaults.items()}
    lists = {key: read_gpu_lists(f"--{key.replace('_', '-')}", text) for key, text in said.items() if text}
    return cast(PoolGpus, lists)


def _plan(args: argparse.Namespace) -> Plan:
    try:
        bursts = tuple(int(part) for part in args.bursts.split(",") if part)
    except ValueError:
        raise ConfigError(f"--bursts {args.bursts!r}: must be whole numbers with commas") from None
    shape = parse_shape("--shape", args.shape) if args.shape else None
    open_shape = parse_shape("--open-shape", args.open_shape) if args.open_shape else shape
    return Plan(
        bursts=bursts,
        fields=_fields(shape, args.steps),
        requests=args.requests,
        rate=args.rate,
        open_fields=_fields(open_shape, args.open_steps or args.steps),
        objectives=Objectives.read("--slo", args.slo),
    )


def _fields(shape: Shape | None, steps: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt": "a red ball moves right on blue"}
    if shape is not None:
        fields["size"] = f"{shape.width}x{shape.height}"
        if shape.frames > 1:
            fields["num_frames"] = shape.frames
    if steps is not None:
        fields["num_inference_steps"] = steps
    return fields


def _options(pairs: Sequence[str]) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found:
            raise ConfigError(f"--option {pair!r}: must look like NAME=VALUE")
        options[name.replace("-", "_")] = {"true": True, "false": False}.get(value, value)
    return options
