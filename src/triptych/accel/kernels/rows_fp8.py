# Triton is untyped, and not there on a machine without a GPU; this module is imported only where it is.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""FP8 quantisation with one scale per row, of a tensor or of its GELU (tanh), in one pass over it.

`torch.compile` makes a two-pass reduction of it, which evaluates an activation twice and is bound by its arithmetic.
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


def reference(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """What the kernel computes. x [rows, width] -> e4m3 [rows, width] and its scales, float32 [rows, 1]."""
    y = (torch.nn.functional.gelu(x, approximate="tanh") if gelu else x).float()
    scale = y.abs().amax(dim=1, keepdim=True).clamp_min(_TINY) / _MAX
    return (y / scale).clamp(-_MAX, _MAX).to(FP8), scale


@triton.jit
def _load(x, row, column, width, gelu: tl.constexpr):
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    if gelu:
        # x * sigmoid(2u) is x * (1 + tanh(u)) / 2 with one exponential; the stock activation rounds to x's type
        u = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = tl.fdiv(value, 1.0 + tl.exp(-2.0 * u)).to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _store(out, row, column, width, value, inverse, top: tl.constexpr):
    value = tl.minimum(tl.maximum(value * inverse, -top), top)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _kernel(
    x, out, scales, width,
    gelu: tl.constexpr, top: tl.constexpr, tiny: tl.constexpr, block: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    # A row lies in registers as two blocks, since a width is seldom near the next power of two.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    value = _load(x, row, column, width, gelu)
    peak = tl.max(tl.abs(value), 0)
    if rest:
        more_column = block + tl.arange(0, rest)
        more = _load(x, row, more_column, width, gelu)
        peak = tl.maximum(peak, tl.max(tl.abs(more), 0))
    scale = tl.maximum(peak, tiny) / top
    inverse = 1.0 / scale
    _store(out, row, column, width, value, inverse, top)
    if rest:
        _store(out, row, more_column, width, more, inverse, top)
    tl.store(scales + row, scale)


@torch.library.custom_op("triptych::rows_fp8", mutates_args=(), device_types="cuda")
def rows_fp8(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """See `reference`. Works on contiguous x."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, dtype=FP8)
    scales = torch.empty(rows, 1, device=x.device, dtype=torch.float32)
    block = 1 << (width.bit_length() - 1)
    rest = triton.next_power_of_2(width - block) if width > block else 0
    warps = max(1, min(16, block // 512))
    _kernel[(rows,)](x, out, scales, width, gelu, _MAX, _TINY, block, rest, num_warps=warps)
    return out, scales


@rows_fp8.register_fake
def _(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format)
    return values, x.new_empty(x.shape[0], 1, dtype=torch.float32)
