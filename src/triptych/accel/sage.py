"""SageAttention (queries and keys in INT8) as a torch operator that `torch.compile` can see through. Lossy."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from typing import Any

import torch

log = logging.getLogger(__name__)


def available(device: torch.device) -> bool:
    """Whether the package is installed and loads, and the GPU can run it (compute capability 8 or more)."""
    if device.type != "cuda" or importlib.util.find_spec("sageattention") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8 and _loads()


@cache
def _loads() -> bool:
    try:
        importlib.import_module("sageattention")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        log.warning("SageAttention is left out: the package does not load: %s", str(error).partition("\n")[0])
        return False
    return True


@torch.library.custom_op("triptych::sage", mutates_args=(), device_types="cuda")
def sage(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Attention. q [batch, queries, heads, dim], k and v [batch, keys, heads, dim], bfloat16; like q."""
    package: Any = importlib.import_module("sageattention")
    return package.sageattn(q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale)


@sage.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
