"""The feed-forward's GELU joined to one of its matrix products, which `torch.compile` does not do by itself.

In bfloat16 it is the epilogue of the product before it; where the layers are FP8 it is one pass with the quantisation
that the product after it needs.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn


@torch.library.custom_op("triptych::linear_gelu", mutates_args=(), device_types="cuda")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(x @ weight.T + bias), the activation in the product's epilogue. x [..., in] -> [..., out]."""
    flat = torch.ops.aten._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return flat.unflatten(0, x.shape[:-1])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class FusedGelu(nn.Module):
    """Stands in for diffusers' ``GELU(approximate="tanh")``, sharing its projection."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.proj = stock.proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        return linear_gelu(hidden_states, self.proj.weight, self.proj.bias)


class QuantisedProduct(nn.Module):
    """Stands in for the linear layer after the activation, and for the activation: x [..., in] -> [..., out].

    The layer's weights are those that torchao quantised, e4m3 [out, in] with float32 scales [out, 1].
    """

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__()
        from triptych.accel.kernels.gelu_fp8 import gelu_fp8

        weight: Any = stock.weight
        self._gelu_fp8 = gelu_fp8
        self.bias = stock.bias
        self.register_buffer("weight", weight.qdata, persistent=False)
        self.register_buffer("scale", weight.scale, persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, scale = self.get_buffer("weight"), self.get_buffer("scale")
        flat, rows = self._gelu_fp8(hidden_states.flatten(0, -2))
        out = torch._scaled_mm(
            flat, weight.t(), rows, scale.t(), bias=self.bias, out_dtype=hidden_states.dtype, use_fast_accum=True
        )
        return out.unflatten(0, hidden_states.shape[:-1])


def fuse_gelu(model: nn.Module) -> int:
    """Put what fits into every feed-forward of ``model`` that has such an activation; returns how many changed."""
    changed = 0
    for module in list(model.modules()):
        if not isinstance(module, FeedForward):
            continue
        first, last = module.net[0], module.net[-1]
        if not isinstance(first, GELU) or first.approximate != "tanh":
            continue
        if _is_plain(first.proj):
            module.net[0] = FusedGelu(first)
            changed += 1
        elif _is_fp8_by_rows(last):
            module.net[0], module.net[-1] = first.proj, QuantisedProduct(last)
            changed += 1
    return changed


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a linear one that nothing was done to, quantised or adapted."""
    return type(layer) is nn.Linear and type(layer.weight.data) is Tensor


def _is_fp8_by_rows(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether torchao quantised a linear layer's weights to FP8 with one scale for each row, and its input as well."""
    weight: Any = getattr(layer, "weight", None)
    scale: Any = getattr(weight, "scale", None)
    return (
        type(layer) is nn.Linear
        and type(weight).__name__ == "Float8Tensor"
        and weight.act_quant_kwargs is not None
        and scale.shape == (weight.shape[0], 1)
    )
