"""Quantised linear layers through torchao: FP8 with one scale per row, or INT8 weights. Both are lossy.

FP8 quantises weights and activations and needs compute capability 8.9; it is faster and halves the weights' memory.
INT8 stores weights only: half the memory, the same arithmetic.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from triptych.config import Quantisation
from triptych.errors import ConfigError

_MIN_FEATURES = 512
"""Smaller layers gain nothing and lose precision."""


def quantise(model: nn.Module, kind: Quantisation, device: torch.device) -> int:
    """Quantise the linear layers of the repeated blocks of a Diffusers model in place; returns how many changed.

    Embeddings, norms and the projections at both ends stay as they are. Raises `ConfigError` when the machine cannot do
    it or the model has no layer that it would change, because the option would silently do nothing.
    """
    if kind == "none":
        return 0
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"quant={kind!r} needs torchao: pip install torchao")
    if kind == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(f"quant='fp8' needs a GPU of compute capability 8.9 or more, not {device}")
    # An extra, so the type checker may not find it.
    ao: Any = importlib.import_module("torchao.quantization")

    if kind == "fp8":
        config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    else:
        config = ao.Int8WeightOnlyConfig()
    changed = 0

    def wanted(module: nn.Module, name: str) -> bool:
        nonlocal changed
        if not isinstance(module, nn.Linear):
            return False
        sizes = (int(module.in_features), int(module.out_features))
        hit = min(sizes) >= _MIN_FEATURES and all(size % 16 == 0 for size in sizes)
        changed += hit
        return hit

    for block in repeated_blocks(model):
        ao.quantize_(block, config, filter_fn=wanted)
    if not changed:
        raise ConfigError(
            f"quant={kind!r}: {type(model).__name__} has no linear layer in its blocks that is wide enough"
        )
    return changed


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a Diffusers model repeats, which hold nearly all of its work; empty when it declares none."""
    names: list[str] = getattr(model, "_repeated_blocks", None) or []
    return [module for module in model.modules() if type(module).__name__ in names]
