"""Quantised linear layers through torchao: FP8 with one scale per row, or INT8 weights. Both are lossy.

FP8 quantises weights and activations and needs compute capability 8.9; it is faster and halves the weights' memory.
INT8 stores weights only: half the memory, the same arithmetic.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from triptych.config import Quantisation
from triptych.errors import ConfigError

_MIN_FEATURES = 512
"""Smaller layers gain nothing and lose precision."""


def quantise(models: Sequence[nn.Module], kind: Quantisation, device: torch.device) -> int:
    """Quantise the linear layers of the blocks of models in place; returns how many changed.

    Embeddings, norms and the projections at both ends stay as they are. Blocks in host memory visit ``device`` one at a
    time, so a model need not fit there before it is small. Raises `ConfigError` when the machine cannot do it or there
    is no layer that it would change, because the option would silently do nothing.
    """
    if kind == "none":
        return 0
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"quant={kind!r} needs torchao: pip install torchao")
    if kind == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(f"quant='fp8' needs a GPU of compute capability 8.9 or more, not {device}")
    changed = 0

    def wanted(module: nn.Module, name: str) -> bool:
        nonlocal changed
        if not isinstance(module, nn.Linear):
            return False
        sizes = (int(module.in_features), int(module.out_features))
        hit = min(sizes) >= _MIN_FEATURES and all(size % 16 == 0 for size in sizes)
        if kind == "fp8" and module.weight.dtype != torch.bfloat16:
            hit = False  # its kernels take nothing else; some layers are kept in float32
        changed += hit
        return hit

    for block in (block for model in models for block in blocks(model)):
        home = next(block.parameters()).device
        _apply(block.to(device), kind, wanted)
        block.to(home)
    if not changed:
        names = ", ".join(type(model).__name__ for model in models) or "nothing"
        raise ConfigError(f"quant={kind!r}: {names} has no linear layer in its blocks that is wide enough")
    return changed


def write_weight(layer: Any, weight: torch.Tensor) -> None:
    """Give a layer other weights [out, in, ...] in the memory of those that it has, quantised as these are."""
    live = layer.weight
    if type(live.data) is torch.Tensor:
        live.data.copy_(weight)
        return
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    _apply(nn.Sequential(made), "fp8" if type(live).__name__ == "Float8Tensor" else "int8", None)
    quantised: Any = made.weight
    for name in live.__tensor_flatten__()[0]:
        getattr(live, name).copy_(getattr(quantised, name))


def _apply(module: nn.Module, kind: Quantisation, wanted: Callable[[nn.Module, str], bool] | None) -> None:
    # An extra, so the type checker may not find it.
    ao: Any = importlib.import_module("torchao.quantization")
    if kind == "fp8":
        config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    else:
        config = ao.Int8WeightOnlyConfig()
    ao.quantize_(module, config, filter_fn=wanted)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that hold nearly all of a model's work, without what stands before and behind them.

    Those that a Diffusers model says to repeat, or where it names none, the entries of its outermost module lists; of a
    Transformers model those that it declares as not to be split. Autoencoders have none: they are convolutions.
    """
    if type(model).__module__.startswith("transformers."):
        whole: Any = getattr(model, "_no_split_modules", None)
        names: set[str] = set(whole or ())
        return [module for module in model.modules() if type(module).__name__ in names]
    return repeated_blocks(model) or ([] if hasattr(model, "decode") else list(_listed(model)))


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Entries of lists of modules, but for lone layers, which are heads and projections."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (entry for entry in child if any(entry.children()))
        else:
            yield from _listed(child)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a Diffusers model says to repeat; empty when it says nothing of it."""
    names: list[str] = getattr(model, "_repeated_blocks", None) or []
    return [module for module in model.modules() if type(module).__name__ in names]
