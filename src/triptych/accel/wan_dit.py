"""Wan's self-attention with norms and rotary embedding in one kernel, which `torch.compile` makes several of."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn


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


def fuse(transformer: nn.Module) -> int:
    """Put it into a Wan transformer; returns how many modules changed."""
    # Imported here because Triton exists only where there is a GPU.
    from triptych.accel.kernels.rms_rope import rms_rope

    changed = 0
    for module in list(transformer.modules()):
        if isinstance(module, WanAttention) and not module.is_cross_attention:
            fused: Any = FusedSelfAttention(rms_rope)
            fused._attention_backend = getattr(module.processor, "_attention_backend", None)
            module.processor = fused
            changed += 1
    return changed
