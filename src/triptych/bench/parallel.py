"""A denoising step on one device against the same step shared by several, and how far the results are apart.

It is the instance's own machinery that is measured: rank 0 in this process, the others in processes of their own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from triptych.bench import synth
from triptych.config import (
    DeviceType,
    InstanceConfig,
    ModelConfig,
    Profile,
    Shape,
    TransferConfig,
    parse_shape,
)
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.codec import encode_state
from triptych.pipeline.load import load_cold, load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.request import complete, first_state
from triptych.pipeline.stage import RolePipeline
from triptych.worker.jobs import Post, ThreadDied
from triptych.worker.ranks.leader import Leader
from triptych.worker.ranks.lockstep import LockstepPipeline

_GUIDED, _PLAIN = 5.0, 1.0
"""Guidance scales of the measured requests: two branches a step, and one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured line."""

    ranks: int
    layout: str
    guidance: bool
    seconds: float
    """Median of a step."""
    ratio: float
    """One device's time over this time."""
    equal: bool
    """Whether the result has the bytes of one device's."""
    error: float
    """Relative error (Frobenius norm) against one device's result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure."""

    model: str
    shape: Shape
    steps: int
    profile: Profile
    device: DeviceType
    gpus: int
    layouts: dict[str, Parallelism]


def run(plan: Plan) -> Iterator[Row]:
    """Measure one device and then each layout; rows come as they are measured."""
    torch.set_grad_enabled(False)
    model = ModelConfig(path=plan.model, device=plan.device, profile=plan.profile)
    base: dict[float, tuple[float, torch.Tensor]] = {}
    alone = load_pipeline(model, (Role.DENOISER,), "cuda:0" if plan.device == "cuda" else "cpu")
    if not isinstance(alone, ModularRolePipeline):
        raise ConfigError(f"{plan.model!r}: only pipelines with modular blocks can be measured without their encoder")
    made = {guidance: _inputs(alone, plan, guidance) for guidance in (_GUIDED, _PLAIN)}
    for guidance, inputs in made.items():
        base[guidance] = _measure(alone, plan, inputs)
        yield _row(1, "alone", guidance, base[guidance], base[guidance])
    del alone
    for name, parallel in plan.layouts.items():
        for guidance, result in _shared(plan, model, parallel, made):
            yield _row(plan.gpus, name, guidance, result, base[guidance])


_Inputs = tuple[dict[str, Any], tuple[bytes, tuple[torch.Tensor, ...]]]


def _shared(
    plan: Plan, model: ModelConfig, parallel: Parallelism, made: dict[float, _Inputs]
) -> Iterator[tuple[float, tuple[float, torch.Tensor]]]:
    config = InstanceConfig(
        roles=(Role.DENOISER,),
        server_addr="tcp://127.0.0.1:1",
        work_port=1,
        transfer=TransferConfig(),
        model=model,
        gpu_ids=tuple(range(plan.gpus)),
        parallel=parallel,
    )
    leader = Leader(config, "bench", _report)
    try:
        team = leader.join()
        own, _ = load_cold(model, config.roles, config.torch_device, team=team)
        leader.await_ready()
        for guidance, inputs in made.items():
            yield guidance, _measure(LockstepPipeline(own, leader), plan, inputs)
        team.leave()
    finally:
        leader.close()


def _report(post: Post) -> None:
    if isinstance(post, ThreadDied):
        Console(stderr=True).print(f"{post.thread}: {post.reason}")


def _inputs(pipeline: ModularRolePipeline, plan: Plan, guidance: float) -> _Inputs:
    """Parameters, and what an encoder would hand over for them, with random embeddings."""
    params = {
        "prompt": "",
        "seed": 1,
        "width": plan.shape.width,
        "height": plan.shape.height,
        "num_frames": plan.shape.frames,
        "num_inference_steps": plan.steps,
        "guidance_scale": guidance,
    }
    state = first_state(pipeline.cut.inputs, complete(pipeline.schema, params), (), pipeline.family)
    config = pipeline.component(Role.DENOISER, "transformer").config
    if not hasattr(config, "text_dim"):
        raise ConfigError(f"{plan.model!r}: embeddings are only known for Wan's transformers")
    generator = torch.Generator().manual_seed(2)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        embeds = torch.randn(1, 512, config.text_dim, generator=generator)
        state[name] = embeds.to(pipeline.device, pipeline.component(Role.DENOISER, "transformer").dtype)
    needed = pipeline.cut.needs[Role.DENOISER].of({})
    return params, encode_state({k: v for k, v in state.items() if k in needed and v is not None}, {})


def _measure(pipeline: RolePipeline, plan: Plan, inputs: _Inputs) -> tuple[float, torch.Tensor]:
    """Median seconds of a step of the second of two equal requests, and its latents in float32 on the host."""
    params, handed = inputs
    samples: list[float] = []
    latents = torch.empty(0)
    for _ in range(2):
        samples.clear()
        run = pipeline.start(Role.DENOISER, params, [handed], ())
        result = None
        while result is None:
            begun = time.perf_counter()
            result = run.advance()
            if plan.device == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - begun)
        latents = max((t for output in result.outputs for t in output.tensors), key=torch.Tensor.numel).float().cpu()
    return statistics.median(samples), latents


def _row(
    ranks: int, layout: str, guidance: float, result: tuple[float, torch.Tensor], base: tuple[float, torch.Tensor]
) -> Row:
    (seconds, latents), (base_seconds, base_latents) = result, base
    return Row(
        ranks=ranks,
        layout=layout,
        guidance=guidance != _PLAIN,
        seconds=seconds,
        ratio=base_seconds / seconds,
        equal=torch.equal(latents, base_latents),
        error=((latents - base_latents).norm() / base_latents.norm()).item(),
    )


LAYOUTS = ("auto", "cfg", "ulysses", "ring", "tp")


def _layout(name: str, gpus: int) -> Parallelism:
    match name:
        case "auto":
            return Parallelism()
        case "cfg":
            return Parallelism(cfg=2)
        case "ulysses":
            return Parallelism(cfg=1, ulysses=gpus)
        case "ring":
            return Parallelism(cfg=1, ring=gpus)
        case "tp":
            return Parallelism(tp=gpus)
        case _:
            raise ConfigError(f"layouts={name!r}: must be among {', '.join(LAYOUTS)}")


def main(argv: Sequence[str]) -> int:
    """``triptych bench parallel MODEL``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="triptych bench parallel", allow_abbrev=False)
    parser.add_argument("model", help=f"model folder, tiny, or a size: {', '.join(sorted(synth.SIZES))}")
    parser.add_argument("--shape", default="832x480x81", help="width x height x frames (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a request (default: %(default)s)")
    parser.add_argument("--num-gpus", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--layouts", default="auto,ulysses", help=f"of {', '.join(LAYOUTS)} (default: %(default)s)")
    parser.add_argument("--profile", choices=("stock", "lossless", "fast"), default="stock")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    layouts = {name: _layout(name, args.num_gpus) for name in args.layouts.split(",")}
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        model = args.model
        if model in synth.SIZES:
            dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
            synth.write(model, Path(folder), torch.device(args.device), dtype, weights=("transformer",))
            model = folder
        plan = Plan(
            model=model,
            shape=parse_shape("shape", args.shape),
            steps=args.steps,
            profile=args.profile,
            device=args.device,
            gpus=args.num_gpus,
            layouts=layouts,
        )
        _print(run(plan), f"{args.model}, {args.shape}, profile {args.profile}, torch {torch.__version__}")
    return 0


def _print(rows: Iterator[Row], title: str) -> None:
    table = Table(title=title)
    for column in ("ranks", "layout", "guidance", "ms a step", "x one", "equal bytes", "relative error"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row.ranks),
            row.layout,
            "on" if row.guidance else "off",
            f"{row.seconds * 1e3:.1f}",
            f"{row.ratio:.2f}",
            "yes" if row.equal else "no",
            f"{row.error:.1e}",
        )
    Console().print(table)
