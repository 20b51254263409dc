"""The feed-forward's GELU in the epilogue of its matrix product, which `torch.compile` does not do by itself."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

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


def fuse_gelu(model: nn.Module) -> int:
    """Put it into every feed-forward of ``model`` that has such an activation; returns how many changed.

    Projections that were quantised or adapted are left alone: their weights are not all that they compute with.
    """
    changed = 0
    for module in list(model.modules()):
        if isinstance(module, FeedForward):
            first = module.net[0]
            if isinstance(first, GELU) and first.approximate == "tanh" and _is_plain(first.proj):
                module.net[0] = FusedGelu(first)
                changed += 1
    return changed


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and type(layer.weight.data) is Tensor
