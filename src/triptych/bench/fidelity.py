"""How far each profile's forwards are from stock Diffusers in float32, on what a real request gives the denoiser.

A request of the model runs in float32, and what its denoiser was given and gave is kept: latents and texts as they are
distributed, from the first step's noise to the last step's picture. Each variant in bfloat16 computes the same
forwards. So it is not the error of random weights, but that of the model that is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from triptych.accel.denoisers import denoises
from triptych.bench.stages import profiles_named, relative
from triptych.config import DeviceType, ModelConfig, Profile, parse_shape
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.launch.device import detect_device
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Relative errors (Frobenius norm) of a variant's forwards against stock Diffusers in float32."""

    variant: str
    forwards: int
    median: float
    mean: float
    worst: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One forward of a request in float32, in host memory."""

    model: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


def run(model: ModelConfig, params: Mapping[str, Any], profiles: Sequence[Profile]) -> Iterator[Row]:
    """One row for stock Diffusers in bfloat16 and one for each of ``profiles``. Raises what loading a model raises,
    `ConfigError` for one that is not cut into blocks, and `BadRequest`."""
    torch.set_grad_enabled(False)
    forwards = _exact(model, params)
    order: tuple[Profile, ...] = ("stock", *profiles)
    for profile in order:
        config = dataclasses.replace(model, dtype="bfloat16", profile=profile)
        pipeline = _loaded(config, (Role.DENOISER,))
        errors = [_error(pipeline, forward) for forward in forwards]
        yield Row(variant=profile, forwards=len(errors), median=median(errors), mean=mean(errors), worst=max(errors))
        del pipeline
        if model.device == "cuda":
            torch.cuda.empty_cache()


def _loaded(config: ModelConfig, roles: tuple[Role, ...]) -> ModularRolePipeline:
    pipeline = load_pipeline(config, roles, config.device)
    if not isinstance(pipeline, ModularRolePipeline):
        raise ConfigError(f"model {config.path}: only models with a modular pipeline can be compared")
    return pipeline


def _exact(model: ModelConfig, params: Mapping[str, Any]) -> list[Forward]:
    """All forwards of one request, by stock Diffusers in float32."""
    pipeline = _loaded(dataclasses.replace(model, dtype="float32", profile="stock"), (Role.ENCODER, Role.DENOISER))
    forwards: list[Forward] = []
    for name, part in _models(pipeline).items():

        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
            forwards.append(Forward(model=name, args=args, kwargs=kwargs, output=_first(output).cpu()))

        part.register_forward_hook(keep, with_kwargs=True)
    inputs: list[tuple[bytes, Sequence[Tensor]]] = []
    for role in (Role.ENCODER, Role.DENOISER):
        stage = pipeline.start(role, params, inputs, [])
        while (result := stage.advance()) is None:
            pass
        inputs = [(output.tree, output.tensors) for output in result.outputs if output.consumer is Role.DENOISER]
    return forwards


def _models(pipeline: ModularRolePipeline) -> dict[str, nn.Module]:
    components = pipeline.pipeline(Role.DENOISER).components
    return {name: part for name, part in components.items() if denoises(name) and isinstance(part, nn.Module)}


def _error(pipeline: ModularRolePipeline, forward: Forward) -> float:
    """Of one forward. Latents and texts are rounded to bfloat16; timesteps, which have one axis, are not."""

    def brought(tensor: Tensor) -> Tensor:
        rounds = tensor.is_floating_point() and tensor.ndim > 1
        return tensor.to(pipeline.device, torch.bfloat16 if rounds else tensor.dtype)

    args, kwargs = pytree.tree_map_only(Tensor, brought, (forward.args, forward.kwargs))
    output = _first(_models(pipeline)[forward.model](*args, **kwargs))
    return relative(output.cpu(), forward.output)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def main(argv: Sequence[str]) -> int:
    """``triptych bench fidelity MODEL``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="triptych bench fidelity", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", nargs="?", default="tiny", help="folder, Hub id or embedded model (default: tiny)")
    parser.add_argument("--prompt", default="a red ball moving right")
    parser.add_argument("--shape", metavar="WxHxF", help="pixels and frames (default: the model's)")
    parser.add_argument("--steps", type=int, help="denoising steps (default: the model's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profiles", default="lossless", help="lossless, fast, or both with a comma")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    args = parser.parse_args(argv)
    profiles = profiles_named(args.profiles)
    device: DeviceType = args.device or detect_device()
    params: dict[str, Any] = {"prompt": args.prompt, "seed": args.seed}
    if args.steps is not None:
        params["num_inference_steps"] = args.steps
    if args.shape is not None:
        shape = parse_shape("--shape", args.shape)
        params |= {"width": shape.width, "height": shape.height}
        params |= {"num_frames": shape.frames} if shape.frames > 1 else {}
    rows: list[Row] = []
    for row in run(ModelConfig(path=args.model, device=device), params, profiles):
        rows.append(row)
        print(f"{row.variant}: {row.forwards} forwards, median relative error {row.median:.2e}", flush=True)
    table = Table(title=f"{args.model}: relative error of a forward against stock Diffusers in float32")
    for column in ("bfloat16", "forwards", "median", "mean", "worst"):
        table.add_column(column, justify="left" if column == "bfloat16" else "right")
    for row in rows:
        table.add_row(row.variant, str(row.forwards), *(f"{x:.2e}" for x in (row.median, row.mean, row.worst)))
    # A pipe has no width of its own, and 80 columns are too few.
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 0
