# Triton is untyped, and not there on a machine without a GPU; this module is imported only where it is.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""GELU (tanh) followed by FP8 quantisation with one scale per row, in one pass over the tensor.

`torch.compile` makes a two-pass reduction of it that evaluates the activation twice and is bound by its arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
_MAX = 448.0
_TINY = 1e-12
"""A row of zeros needs a scale too."""


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel computes. x [rows, width] -> e4m3 [rows, width] and its scales, float32 [rows, 1]."""
    y = torch.nn.functional.gelu(x, approximate="tanh").float()
    scale = y.abs().amax(dim=1, keepdim=True).clamp_min(_TINY) / _MAX
    return (y / scale).clamp(-_MAX, _MAX).to(FP8), scale


@triton.jit
def _kernel(x, out, scales, width, top: tl.constexpr, tiny: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    # x * sigmoid(2u) is x * (1 + tanh(u)) / 2 with one exponential
    u = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    value = value / (1.0 + tl.exp(-2.0 * u))
    # the stock activation rounds to the tensor's type
    value = value.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), tiny) / top
    value = tl.minimum(tl.maximum(value * (1.0 / scale), -top), top)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@torch.library.custom_op("triptych::gelu_fp8", mutates_args=(), device_types="cuda")
def gelu_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference`. Works on contiguous x."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, dtype=FP8)
    scales = torch.empty(rows, 1, device=x.device, dtype=torch.float32)
    block = 1 << (width - 1).bit_length()
    _kernel[(rows,)](x, out, scales, width, _MAX, _TINY, block, num_warps=max(1, min(16, block // 512)))
    return out, scales


@gelu_fp8.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format), x.new_empty(
        x.shape[0], 1, dtype=torch.float32
    )
