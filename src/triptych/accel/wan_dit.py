"""Fusions for Wan's transformer that `torch.compile` does not find by itself.

Self-attention norms and rotary embedding run in one kernel, and the feed-forward's GELU rides on its matrix product.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention
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


class FusedSelfAttention:
    """Wan's self-attention processor with norm and rotary embedding fused. Cross-attention keeps the stock one."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, rms_rope: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]) -> None:
        self._rms_rope = rms_rope

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is None
        assert rotary_emb is not None
        cos = rotary_emb[0][0, :, 0, 0::2].contiguous()
        sin = rotary_emb[1][0, :, 0, 1::2].contiguous()
        heads = attn.heads
        query = self._rms_rope(attn.to_q(hidden_states), attn.norm_q.weight, cos, sin, heads, attn.norm_q.eps)
        key = self._rms_rope(attn.to_k(hidden_states), attn.norm_k.weight, cos, sin, heads, attn.norm_k.eps)
        value = attn.to_v(hidden_states)
        out = dispatch_attention_fn(
            *(x.unflatten(2, (heads, -1)) for x in (query, key, value)),
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        out = attn.to_out[0](out.flatten(2, 3).type_as(query))
        return attn.to_out[1](out)


def fuse(transformer: nn.Module, *, gelu: bool = True) -> int:
    """Put the fusions into a Wan transformer; returns how many modules changed.

    ``gelu``: also the activation into its product, which quantised layers have a product of their own for.
    """
    # Imported here because Triton exists only where there is a GPU.
    from triptych.accel.kernels.rms_rope import rms_rope

    changed = 0
    for module in list(transformer.modules()):
        if isinstance(module, WanAttention) and not module.is_cross_attention:
            fused: Any = FusedSelfAttention(rms_rope)
            fused._attention_backend = getattr(module.processor, "_attention_backend", None)
            module.processor = fused
            changed += 1
        if gelu and isinstance(module, FeedForward):
            first = module.net[0]
            if isinstance(first, GELU) and first.approximate == "tanh":
                module.net[0] = FusedGelu(first)
                changed += 1
    return changed
