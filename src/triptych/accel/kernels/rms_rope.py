# Triton is untyped, and not there on a machine without a GPU; this module is imported only where it is.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""RMS norm over all heads followed by rotary embedding of interleaved pairs, in one pass over the tensor.

`torch.compile` makes a two-pass reduction of it that runs at a quarter of the memory's speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """What the kernel computes. x [batch, tokens, heads * dim]; cos and sin float32 [tokens, dim / 2]; like x."""
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    even, odd = y.unflatten(-1, (heads, -1)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-3).type_as(x)


@triton.jit
def _kernel(
    x, weight, cos, sin, out, tokens,
    width: tl.constexpr, half: tl.constexpr, eps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gamma = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    # the stock norm rounds to the tensor's type before the rotation
    value = (value * scale * gamma).to(out.dtype.element_ty).to(tl.float32)
    even, odd = tl.split(tl.reshape(value, (block // 2, 2)))
    pair = tl.arange(0, block // 2) % half
    token = row % tokens
    c = tl.load(cos + token * half + pair)
    s = tl.load(sin + token * half + pair)
    rotated = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (block,))
    tl.store(out + row * width + column, rotated.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("triptych::rms_rope", mutates_args=(), device_types="cuda")
def rms_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """See `reference`. Works on contiguous x; cos and sin are contiguous float32 [tokens, dim / 2]."""
    x = x.contiguous()
    batch, tokens, width = x.shape
    out = torch.empty_like(x)
    block = 1 << (width - 1).bit_length()
    _kernel[(batch * tokens,)](x, weight, cos, sin, out, tokens, width, width // heads // 2, eps, block, num_warps=4)
    return out


@rms_rope.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
