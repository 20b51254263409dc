"""FP8 products whose input comes from a kernel that the compiler cannot join its quantisation to, or does badly.

After attention the quantisation would be a pass by itself, and after GELU one that evaluates the activation twice:
both are one pass of a kernel here.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn


class RowsProduct(nn.Module):
    """Stands in for a linear layer that torchao quantised, and for the GELU before it where ``gelu`` says so.

    x [..., in] -> [..., out]; the weights are e4m3 [out, in] with float32 scales [out, 1].
    """

    def __init__(self, stock: nn.Linear, *, gelu: bool) -> None:
        super().__init__()
        from triptych.accel.kernels.rows_fp8 import rows_fp8

        weight: Any = stock.weight
        self._rows_fp8 = rows_fp8
        self._gelu = gelu
        self.bias = stock.bias
        self.register_buffer("weight", weight.qdata, persistent=False)
        self.register_buffer("scale", weight.scale, persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, scale = self.get_buffer("weight"), self.get_buffer("scale")
        flat, rows = self._rows_fp8(hidden_states.flatten(0, -2), self._gelu)
        out = torch._scaled_mm(
            flat, weight.t(), rows, scale.t(), bias=self.bias, out_dtype=hidden_states.dtype, use_fast_accum=True
        )
        return out.unflatten(0, hidden_states.shape[:-1])


def fuse_fp8(model: nn.Module) -> int:
    """Put it into every feed-forward with GELU (tanh) and behind every attention of ``model``; how many changed."""
    changed = 0
    for module in list(model.modules()):
        if isinstance(module, FeedForward):
            first, last = module.net[0], module.net[-1]
            if isinstance(first, GELU) and first.approximate == "tanh" and _is_fp8_by_rows(last):
                module.net[0], module.net[-1] = first.proj, RowsProduct(last, gelu=True)
                changed += 1
        out = getattr(module, "to_out", None)
        if isinstance(out, nn.ModuleList) and _is_fp8_by_rows(product := out[0]):
            out[0] = RowsProduct(product, gelu=False)
            changed += 1
    return changed


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
