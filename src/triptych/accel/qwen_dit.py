"""What keeps Qwen-Image's transformer from being fast, put right without changing what it computes.

Its rotary embedding multiplies complex numbers, for which `torch.compile` makes no kernel; here the same products are
written out in real ones. Its pipeline passes a mask also where every token of the text counts, and attention with a
mask takes a slow path; such a mask is left out. To see whether it is one is to wait for the GPU, so each mask is looked
at once, not in every step.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor, nn


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs. x [batch, tokens, heads, dim]; freqs [tokens, dim]; like x.

    In ``freqs`` each angle's cosine stands before its sine.
    """
    cos, sin = freqs[:, None].unflatten(-1, (-1, 2)).unbind(-1)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(3).type_as(x)


class RealRotaryAttention:
    """The joint attention of both streams with the rotation in real numbers."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert attention_mask is None
        assert image_rotary_emb is not None
        mask = None
        if encoder_hidden_states_mask is not None:
            ones = encoder_hidden_states_mask.new_ones(hidden_states.shape[0], hidden_states.shape[1])
            mask = torch.cat([encoder_hidden_states_mask, ones], dim=1)[:, None, None, :]
        width = attn.inner_dim // attn.heads
        image, text = (
            [project(stream).unflatten(-1, (-1, width)) for project in projections]
            for stream, projections in (
                (hidden_states, (attn.to_q, attn.to_k, attn.to_v)),
                (encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)),
            )
        )
        image_freqs, text_freqs = image_rotary_emb
        query = torch.cat(
            [rotate(attn.norm_added_q(text[0]), text_freqs), rotate(attn.norm_q(image[0]), image_freqs)], dim=1
        )
        key = torch.cat(
            [rotate(attn.norm_added_k(text[1]), text_freqs), rotate(attn.norm_k(image[1]), image_freqs)], dim=1
        )
        value = torch.cat([text[2], image[2]], dim=1)
        out = dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        out = out.flatten(2, 3).to(query.dtype)
        length = encoder_hidden_states.shape[1]
        picture, words = out[:, length:].contiguous(), out[:, :length].contiguous()
        return attn.to_out[1](attn.to_out[0](picture)), attn.to_add_out(words)


class Masks:
    """Which masks hide a token, of those that are still there. Used from one thread."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
        """By the mask's address: the mask, its version when it was looked at, and whether it hides anything."""

    def __len__(self) -> int:
        """How many masks are remembered."""
        return len(self._known)

    def hides(self, mask: Tensor) -> bool:
        """Whether ``mask`` hides a token; waits for the GPU when it is a new one or was written to."""
        if mask.is_inference():  # which does not say when it changes
            return not bool(mask.all())
        address = id(mask)
        known = self._known.get(address)
        if known is None or known[0]() is not mask or known[1] != mask._version:
            known = weakref.ref(mask, functools.partial(self._forget, address)), mask._version, not bool(mask.all())
            self._known[address] = known
        return known[2]

    def _forget(self, address: int, dead: weakref.ref[Tensor]) -> None:
        """A mask is gone; what stands under its old address may by now be another's."""
        if address in self._known and self._known[address][0] is dead:
            del self._known[address]


def fuse(transformer: nn.Module) -> int:
    """Put it into a Qwen-Image transformer; returns how many attention modules changed."""
    changed = 0
    for module in transformer.modules():
        processor: Any = getattr(module, "processor", None)
        if isinstance(processor, QwenDoubleStreamAttnProcessor2_0):
            made: Any = RealRotaryAttention()
            made._attention_backend = processor._attention_backend
            made._parallel_config = processor._parallel_config
            module.processor = made
            changed += 1
    _make_frequencies_real(transformer)
    return changed


def leave_out_masks(transformer: nn.Module) -> None:
    """Have a Qwen-Image transformer's forwards told nothing of masks that hide nothing."""
    compute: Callable[..., Any] = transformer.forward
    masks = Masks()

    @functools.wraps(compute)
    def forward(*args: Any, encoder_hidden_states_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if encoder_hidden_states_mask is not None and not masks.hides(encoder_hidden_states_mask):
            encoder_hidden_states_mask = None
        return compute(*args, encoder_hidden_states_mask=encoder_hidden_states_mask, **kwargs)

    transformer.forward = forward


def _make_frequencies_real(transformer: Any) -> None:
    """Have the blocks get the rotation's frequencies as real numbers; a graph that takes complex ones is slower.

    They stay [tokens, ...] of two dimensions, which is how ranks that share the tokens know them.
    """
    compute: Callable[..., Any] = transformer.pos_embed.forward

    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(torch.view_as_real(freqs).flatten(1) for freqs in compute(*args, **kwargs))

    transformer.pos_embed.forward = forward
