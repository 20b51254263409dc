"""FlashAttention-3 (forward only, the `fa3-fwd` wheel) as a torch operator that `torch.compile` can see through."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from triptych.accel.compiling import Overflow, allow_many_graphs
from triptych.accel.sizes import Sizes

log = logging.getLogger(__name__)

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_FEW_KEYS = 2048
"""Over so few keys (a text's), quantising the queries takes longer than FP8 saves."""


def available(device: torch.device) -> bool:
    """Whether the wheel is installed and loads, and the GPU is a Hopper (compute capability 9)."""
    if device.type != "cuda" or importlib.util.find_spec("fa3_fwd") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and _loads()


@cache
def _loads() -> bool:
    """Whether the kernel is there: a wheel that was built for another torch is installed all the same."""
    try:
        _kernel()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        log.warning("FlashAttention-3 is left out: the fa3-fwd wheel does not load beside torch %s: %s",
                    torch.__version__, str(error).partition("\n")[0])  # fmt: skip
        return False
    return True


def _kernel() -> Any:
    importlib.import_module("fa3_fwd._C")
    return torch.ops.fa3_fwd.fwd


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, **descale: Any) -> torch.Tensor:
    descales = [descale.get(name) for name in ("q_descale", "k_descale", "v_descale")]
    # Positional, as the operator wants them: new keys, paging, rotary and ragged batches are not used here.
    head = [q, k, v, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None]
    tail = [None, *descales, scale, causal, -1, -1, 0, 0.0, True, None, 1, None, 0]
    return _kernel()(*head, *tail)[0]


@torch.library.custom_op("triptych::flash3", mutates_args=(), device_types="cuda")
def flash3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Exact attention. q [batch, queries, heads, dim], k and v [batch, keys, heads, dim], bfloat16; like q."""
    return _run(q, k, v, scale, causal)


@flash3.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op("triptych::flash3_fp8", mutates_args=(), device_types="cuda")
def flash3_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Lossy attention in FP8 (e4m3) with one scale per batch and head for each of q, k and v; bfloat16 out.

    Exact over few keys, where that is the faster one.
    """
    if k.shape[1] < _FEW_KEYS:
        return _run(q, k, v, scale, causal)
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = (_quantising(x) for x in (q, k, v))
    return _run(q8, k8, v8, scale, causal, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


@flash3_fp8.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def compile_quantising(overflow: Overflow, sizes: Sizes) -> None:
    """Have FP8 attention quantise by compiled graphs; see `Overflow.compiled_for`, of which ``overflow`` is one."""
    global _quantising
    allow_many_graphs()
    _quantising = overflow.compiled_for(_quantise, sizes)


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [batch, tokens, heads, dim] as e4m3 and its descale factors, float32 [batch, heads]."""
    # In two passes, each of which has work for the whole GPU, also where a graph is made for any number of tokens.
    peak = x.abs().amax(dim=3).amax(dim=1).float().clamp_min(1e-6)
    scaled = x.float() * (_FP8_MAX / peak)[:, None, :, None]
    return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8), peak / _FP8_MAX


_quantising: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _quantise
