"""One denoiser forward and one VAE decode at a real size: stock Diffusers against each profile, in one run.

Each is timed in two ways: waited for, as by who calls it once, and queued behind others of its kind by the GPU's own
clock, which is what a step takes within a request. What is compiled for it is kept where a server finds it.

Random weights from `triptych.bench.synth`: times do not depend on the values. Errors of the denoiser and of the VAE are
those of one call against stock Diffusers in float32, of the same weights and inputs; lossless is what has an error no
larger than stock Diffusers has in bfloat16. That reference takes longer than all the rest and can be
left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from rich.console import Console
from rich.table import Table

from triptych.accel.compiling import allow_many_graphs, default_folder, keep_graphs_in
from triptych.accel.plan import accelerate
from triptych.accel.prompts import PromptCache, install
from triptych.accel.sizes import rehearsing
from triptych.accel.tally import Tally
from triptych.bench import synth
from triptych.bench.timing import Times, first_call, measure
from triptych.config import Profile, Shape, parse_shape
from triptych.errors import ConfigError

_DEVICE: Final = torch.device("cuda")
_PEAK_TFLOPS = 743.0
"""Sustained bfloat16 matrix throughput of one H200, measured; the floor of a forward is its work at this rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured line. ``error`` is the relative error (Frobenius norm) against stock Diffusers in float32; that of
    the text encoder is against stock in bfloat16."""

    stage: str
    variant: str
    seconds: float
    """Of a call that is waited for, with what the host takes before the GPU has its first work."""
    ratio: float
    """Stock time over this time."""
    launched: float
    """Seconds of that call until the host has given the GPU all work: where that is most of it, the host is slow."""
    queued: float
    """Seconds of a call among others that the GPU has in its queue already, as within a request."""
    queued_ratio: float
    """Stock time of the same kind over this time."""
    floor_share: float | None
    """Floor time over the queued time; None where the floor is not known."""
    error: float | None
    peak_gib: float
    first: float = 0.0
    """Seconds of the first call, which compiles; 0 where nothing is compiled."""


STAGES = ("text", "denoiser", "decoder")


def run(
    name: str,
    shape: Shape,
    profiles: tuple[Profile, ...],
    repeats: int = 5,
    stages: Sequence[str] = STAGES,
    *,
    errors: bool = True,
    undeclared: bool = False,
) -> Iterator[Row]:
    """Measure the ``stages`` of the named size; rows come as they are measured. Needs a CUDA GPU.

    Without ``errors`` nothing is computed in float32 to compare with. ``undeclared``: as by a server whose warm-up did
    not have that shape.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench stages needs a CUDA GPU: the real sizes do not fit a CPU's patience")
    torch.set_grad_enabled(False)
    keep_graphs_in(default_folder())
    allow_many_graphs()
    with nullcontext() if undeclared else rehearsing():
        if "text" in stages:
            yield from _text_encoder(name, repeats)
        if "denoiser" in stages:
            yield from _denoiser(name, shape, profiles, repeats, errors=errors)
        if "decoder" in stages:
            yield from _decoder(name, shape, profiles, repeats, errors=errors)


def _text_encoder(name: str, repeats: int) -> Iterator[Row]:
    """512 tokens computed, and found among the prompts that were seen before."""
    device = _DEVICE
    model: Any = synth.build(name, "text_encoder", device, torch.bfloat16)
    ids = torch.arange(1, 513, device=device)[None]
    mask = torch.ones_like(ids)
    reference = model(ids, mask)[0]
    stock: Times | None = None
    for variant in ("stock", "cached prompt"):
        if variant != "stock":
            install(model, PromptCache(max_bytes=1 << 28, tally=Tally()), "text_encoder")
        output = model(ids, mask)[0]
        took = measure(lambda: model(ids, mask), repeats)
        stock = stock or took
        yield Row(
            stage="text encoder",
            variant=variant,
            **took.against(stock),
            floor_share=None,
            error=None if variant == "stock" else relative(output, reference),
        )
    torch.cuda.empty_cache()


class _Forward(Protocol):
    def __call__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """What ``model`` gives for the inputs, which are bfloat16 numbers, as ``dtype``."""
        ...


def forward_of(name: str, shape: Shape, device: torch.device) -> _Forward:
    """A denoiser's forward on random inputs of that size and shape, always the same ones."""
    frames, height, width = 1 + (shape.frames - 1) // 4, shape.height // 8, shape.width // 8
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    generator = torch.Generator(device).manual_seed(1)
    if name.startswith("qwen"):
        tokens = torch.randn(1, height // 2 * (width // 2), 64, generator=generator, **options)
        text = torch.randn(1, 256, 3584, generator=generator, **options)
        time_step = torch.tensor([0.5], **options)
        grid = [[(1, height // 2, width // 2)]]
        return lambda model, dtype=torch.bfloat16: model(
            hidden_states=tokens.to(dtype),
            timestep=time_step.to(dtype),
            encoder_hidden_states=text.to(dtype),
            img_shapes=grid,
            return_dict=False,
        )[0]
    config = synth.size_named(name).components["transformer"][2]
    latents = torch.randn(1, config.get("in_channels", 16), frames, height, width, generator=generator, **options)
    text = torch.randn(1, 512, 4096, generator=generator, **options)
    image = torch.randn(1, 257, 1280, generator=generator, **options) if "image_dim" in config else None
    time_step = torch.tensor([500.0], device=device)
    return lambda model, dtype=torch.bfloat16: model(
        latents.to(dtype), time_step, text.to(dtype), None if image is None else image.to(dtype), return_dict=False
    )[0]


def exact_forward(name: str, forward: _Forward, device: torch.device) -> torch.Tensor:
    """What the stock denoiser gives in float32, on the CPU: with the weights that `build` makes in bfloat16, and no
    product rounded to fewer bits."""
    model = synth.build(name, "transformer", device, torch.bfloat16).float()
    with _all_bits():
        output = forward(model, torch.float32).cpu()
    del model
    torch.cuda.empty_cache()
    return output


@contextmanager
def _all_bits() -> Generator[None]:
    """Convolutions and matrix products of float32 without TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _denoiser(name: str, shape: Shape, profiles: tuple[Profile, ...], repeats: int, *, errors: bool) -> Iterator[Row]:
    device, cache = _DEVICE, default_folder()
    call = forward_of(name, shape, device)
    reference = exact_forward(name, call, device) if errors else None
    stock: Times | None = None
    order: tuple[Profile, ...] = ("stock", *profiles)
    for profile in order:
        model = synth.build(name, "transformer", device, torch.bfloat16)
        accelerate({"transformer": model}, device=device, dtype=torch.bfloat16, profile=profile, cache_dir=cache)
        output, first = first_call(lambda model=model: call(model))
        took = measure(lambda model=model: call(model), repeats, settles=profile != "stock")
        stock = stock or took
        work = _wan_tflop(model, shape) if name.startswith("wan") else None
        yield Row(
            stage="denoiser forward",
            variant=profile,
            **took.against(stock),
            floor_share=None if work is None else work / _PEAK_TFLOPS / took.queued,
            error=None if reference is None else relative(output.cpu(), reference),
            first=first,
        )
        del model, output
        torch.cuda.empty_cache()


def _decoder(name: str, shape: Shape, profiles: tuple[Profile, ...], repeats: int, *, errors: bool) -> Iterator[Row]:
    device, cache = _DEVICE, default_folder()
    latents = torch.randn(
        1, 16, 1 + (shape.frames - 1) // 4, shape.height // 8, shape.width // 8, device=device, dtype=torch.bfloat16
    )
    reference = _exact_decode(name, latents) if errors else None
    stock: Times | None = None
    order: tuple[Profile, ...] = ("stock", *(p for p in profiles if p != "fast"))
    for profile in order:
        vae: Any = synth.build(name, "vae", device, torch.float32).to(torch.bfloat16)
        accelerate({"vae": vae}, device=device, dtype=torch.bfloat16, profile=profile, cache_dir=cache)
        output, first = first_call(lambda vae=vae: vae.decode(latents, return_dict=False)[0])
        took = measure(lambda vae=vae: vae.decode(latents, return_dict=False)[0], max(3, repeats // 2))
        stock = stock or took
        yield Row(
            stage="VAE decode",
            variant=profile,
            **took.against(stock),
            floor_share=None,
            error=None if reference is None else relative(output.cpu(), reference),
            first=first,
        )
        del vae, output
        torch.cuda.empty_cache()


def _exact_decode(name: str, latents: torch.Tensor) -> torch.Tensor:
    """What the stock VAE gives in float32, on the CPU."""
    exact: Any = synth.build(name, "vae", latents.device, torch.float32)
    with _all_bits():
        pictures = exact.decode(latents.float(), return_dict=False)[0].cpu()
    del exact
    torch.cuda.empty_cache()
    return pictures


def _wan_tflop(model: Any, shape: Shape) -> float:
    """Work of one forward in TFLOP: attention and linear layers, two operations a multiply-add."""
    config = model.config
    width = config.num_attention_heads * config.attention_head_dim
    tokens = (1 + (shape.frames - 1) // 4) * (shape.height // 16) * (shape.width // 16)
    attention = 4 * tokens * width * (tokens + 512)
    linear = 2 * tokens * width * (6 * width + 2 * config.ffn_dim)
    return config.num_layers * (attention + linear) / 1e12


def relative(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Of two results, the difference over the reference (Frobenius norm)."""
    return ((output.float() - reference.float()).norm() / reference.float().norm()).item()


def print_rows(rows: list[Row], title: str) -> None:
    """The rows as a table on standard output."""
    table = Table(title=title)
    for column in ("stage", "variant"):
        table.add_column(column)
    for column in (
        *("waited for ms", "x stock", "to launch", "queued ms", "x stock"),
        *("share of floor", "relative error", "peak GiB", "first s"),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.stage,
            row.variant,
            f"{row.seconds * 1e3:.1f}",
            f"{row.ratio:.2f}",
            f"{row.launched * 1e3:.1f}",
            f"{row.queued * 1e3:.1f}",
            f"{row.queued_ratio:.2f}",
            "" if row.floor_share is None else f"{row.floor_share:.0%}",
            "" if row.error is None else f"{row.error:.2e}",
            f"{row.peak_gib:.1f}",
            f"{row.first:.1f}" if row.first else "",
        )
    # A pipe has no width of its own, and 80 columns are too few.
    Console(width=None if sys.stdout.isatty() else 144).print(table)


def main(argv: Sequence[str]) -> int:
    """``triptych bench stages SIZE``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="triptych bench stages", allow_abbrev=False)
    parser.add_argument("size", choices=sorted(synth.SIZES))
    parser.add_argument("--shape", default="832x480x81", help="width x height x frames (default: %(default)s)")
    parser.add_argument("--profiles", default="lossless", help="lossless, fast, or both with a comma")
    parser.add_argument("--stages", default=",".join(STAGES), help="which of them, with commas (default: %(default)s)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="counted calls of each, or three where they take long (default: %(default)s)",
    )
    parser.add_argument(
        "--no-error",
        action="store_true",
        help="leave out the comparison with float32, which takes longer than the rest",
    )
    parser.add_argument(
        "--undeclared", action="store_true", help="as served where --warmup does not name the shape (default: it does)"
    )
    args = parser.parse_args(argv)
    stages = args.stages.split(",")
    if unknown := set(stages).difference(STAGES):
        raise ConfigError(f"--stages {args.stages!r}: {', '.join(sorted(unknown))} is none of {', '.join(STAGES)}")
    rows: list[Row] = []
    shape, profiles = parse_shape("--shape", args.shape), profiles_named(args.profiles)
    options = {"errors": not args.no_error, "undeclared": args.undeclared}
    for row in run(args.size, shape, profiles, args.repeats, stages, **options):
        rows.append(row)
        error = "" if row.error is None else f", relative error {row.error:.2e}"
        print(
            f"{row.stage}, {row.variant}: {row.seconds * 1e3:.1f} ms waited for, {row.launched * 1e3:.1f} to launch, "
            f"{row.queued * 1e3:.1f} queued, first call {row.first:.1f} s{error}",
            flush=True,
        )
    print_rows(rows, f"{args.size}, {args.shape}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return 0


def profiles_named(text: str) -> tuple[Profile, ...]:
    """The profiles, besides stock, that ``text`` names with commas between. Raises `ConfigError`."""
    known: dict[str, Profile] = {"lossless": "lossless", "fast": "fast"}
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"profiles={text!r}: {name!r} is none of {', '.join(known)}")
    return tuple(known[name] for name in names)
