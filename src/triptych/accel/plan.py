"""Decides what makes a loaded model faster on this machine, does it, and says what was chosen and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from triptych.accel import attention, quant, wan_vae
from triptych.config import Profile, Quantisation

_BENCH_TOKENS = 8192
"""Sequence length of the attention micro-benchmark: long enough to rank backends, short enough to cost nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One way to be faster, whether it is on, and why."""

    name: str
    on: bool
    why: str


def accelerate(
    modules: Mapping[str, nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype,
    profile: Profile,
    backend: str = "auto",
    quantisation: Quantisation = "none",
) -> tuple[Technique, ...]:
    """Apply what ``profile`` allows and the machine has to the real (not weightless) models of a role, in place.

    ``backend`` names an attention backend or is ``auto``; it and ``quantisation`` are about denoisers, and roles
    without one have nothing to change. Raises `ConfigError` when what is asked for by name cannot take effect.
    """
    done: list[Technique] = []
    denoisers = {name: model for name, model in modules.items() if quant.repeated_blocks(model)}
    for name, model in denoisers.items():
        kind = "fp8" if profile == "fast" and quantisation == "none" else quantisation
        done += _attention(name, model, device, dtype, profile, backend)
        if kind != "none":
            layers = quant.quantise(model, kind, device)
            done.append(Technique(name=f"{name}: {kind}", on=True, why=f"{layers} linear layers"))
        if profile != "stock":
            done += _fuse_and_compile(name, model, device, dtype, gelu=kind == "none")
    for name, model in modules.items():
        if wan_vae.supports(model) and profile != "stock":
            done.append(_vae(name, model, device, dtype))
    return tuple(done)


def _attention(
    name: str, model: nn.Module, device: torch.device, dtype: torch.dtype, profile: Profile, backend: str
) -> list[Technique]:
    config: Any = getattr(model, "config", None)
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "attention_head_dim", None)
    if backend == "auto" and (profile == "stock" or dtype != torch.bfloat16 or not heads or not width):
        why = "profile stock" if profile == "stock" else "only measured for bfloat16 models of known head size"
        return [Technique(name=f"{name}: attention", on=False, why=why)]
    if profile == "fast" and backend == "auto" and "flash3-fp8" in attention.present(device):
        backend = "flash3-fp8"
    choice = attention.choose(device, heads=heads or 16, head_dim=width or 128, tokens=_BENCH_TOKENS, requested=backend)
    attention.use_backend(model, choice.backend)
    measured = ", ".join(f"{k} {v * 1e3:.2f} ms" for k, v in choice.seconds.items())
    why = f"{choice.backend}, {choice.reason}" + (f" ({measured})" if measured else "")
    return [Technique(name=f"{name}: attention", on=True, why=why)]


def _fuse_and_compile(
    name: str, model: nn.Module, device: torch.device, dtype: torch.dtype, *, gelu: bool
) -> list[Technique]:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return [Technique(name=f"{name}: compile", on=False, why="needs CUDA and Triton")]
    done: list[Technique] = []
    if type(model).__name__ == "WanTransformer3DModel" and dtype == torch.bfloat16:
        from triptych.accel import wan_dit

        changed = wan_dit.fuse(model, gelu=gelu)
        done.append(Technique(name=f"{name}: fused kernels", on=True, why=f"{changed} modules"))
    compile_blocks(model)
    why = f"{len(quant.repeated_blocks(model))} repeated blocks, one graph per shape"
    return [*done, Technique(name=f"{name}: compile", on=True, why=why)]


def compile_blocks(model: nn.Module) -> None:
    """Compile the repeated blocks, one static graph per shape, with tuned pointwise kernels."""
    set_up_compiler()
    compiled: Any = model
    compiled.compile_repeated_blocks(fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True})


def set_up_compiler() -> None:
    """A server meets many shapes: let each have its graph instead of falling back to eager after eight."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)


def _vae(name: str, model: Any, device: torch.device, dtype: torch.dtype) -> Technique:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return Technique(name=f"{name}: fast decode", on=False, why="needs CUDA and bfloat16")
    set_up_compiler()
    decoder = wan_vae.WanVaeDecoder(model, compiled=importlib.util.find_spec("triton") is not None, align=64)
    wan_vae.install(model, decoder)
    return Technique(name=f"{name}: fast decode", on=True, why=f"chunks of {decoder.chunk} latent frames")
