"""Keys and values of the text, which every step of a request asks for again, computed once.

In Wan's cross-attention they depend on the text alone: neither the step nor the picture has a part in them. (Qwen-Image
and Flux send the text through their blocks together with the picture, so it is another one in each step.) What was
computed belongs to the tensor of embeddings that the model was given: it is found again by that very tensor, as long as
nobody has written to it, and is gone when the tensor is, so requests that take turns, branches of guidance and resumed
checkpoints each have their own. There is a bound on their bytes: a text that comes when that is reached has them
computed anew in every step. The arithmetic is that of the stock model, outside of its blocks' compiled graphs.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from triptych.accel.adapters import drop_when_adapted
from triptych.accel.shortage import drop_when_short

log = logging.getLogger(__name__)

_TEXT_TOKENS: Final = 512
"""The text's share of the context of a model that also attends to a picture's tokens, which stand before it."""

_Key: TypeAlias = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class _Kept:
    """What was computed from the embeddings of one text, and of a picture where there is one."""

    sources: tuple[weakref.ref[Tensor], ...] = ()
    versions: tuple[int, ...] = ()
    embedded: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By embedder: what it made of the embeddings."""
    keys_values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By block: [2, batch, tokens, width]."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for made in (self.embedded, self.keys_values) for tensor in made.values())

    @property
    def stale(self) -> bool:
        """Whether a source is gone or was written to."""
        tensors = [source() for source in self.sources]
        return any(t is None or t._version != v for t, v in zip(tensors, self.versions, strict=True))


class TextKeys:
    """What one model has computed from texts that are still there. Used from one thread, but for `drop`."""

    def __init__(self, most: int = 1 << 31) -> None:
        """At most so many bytes of it are kept."""
        self._kept: dict[_Key, _Kept] = {}
        self._now = _Kept()
        self._most = most
        self._told = False
        drop_when_short(self)
        drop_when_adapted(self)

    def __len__(self) -> int:
        """How many texts are remembered."""
        return len(self._kept)

    def drop(self) -> None:
        """Forget all of it, to be computed again."""
        self._kept.clear()

    def install(self, model: nn.Module) -> int:
        """Have the forwards of a Wan transformer use this; returns how many blocks there are. To be called after the
        blocks are compiled, if they are."""
        transformer: Any = model
        compute: Callable[..., Any] = model.forward
        signature = inspect.signature(compute)

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            texts = (given["encoder_hidden_states"], given.get("encoder_hidden_states_image"))
            self._now = now = self._find(tuple(text for text in texts if text is not None))
            try:
                out = compute(*args, **kwargs)
                self._keep(now)
                return out
            finally:
                self._now = _Kept()

        model.forward = forward
        embedder = transformer.condition_embedder
        for name in ("text_embedder", "image_embedder"):
            if (part := getattr(embedder, name)) is not None:
                self._install_embedder(part, name)
        for index, block in enumerate(transformer.blocks):
            attend = KeptTextAttention()
            attend._attention_backend = block.attn2.processor._attention_backend
            block.attn2.processor = attend
            block.text_of = functools.partial(self._of, block.attn2, index)
            block.__class__ = _with_text(type(block))
        return len(transformer.blocks)

    def _find(self, texts: tuple[Tensor, ...]) -> _Kept:
        """What is kept of these texts, or what is to become that."""
        capturing = texts[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or any(text.is_inference() for text in texts):
            return _Kept()  # a recording must compute it from its inputs; the other kind does not say when it changes
        for key in [key for key, kept in list(self._kept.items()) if kept.stale]:
            self._kept.pop(key, None)
        key = tuple(map(id, texts))
        versions = tuple(text._version for text in texts)
        known = self._kept.get(key)
        if known is None:
            forget = functools.partial(_forget, self._kept, key)
            known = _Kept(sources=tuple(weakref.ref(text, forget) for text in texts), versions=versions)
        return known

    def _keep(self, made: _Kept) -> None:
        """Keep what a forward has made, if there is room: those that are there will be asked for before it is."""
        key = tuple(id(source()) for source in made.sources)
        if not made.sources or key in self._kept or made.stale:
            return
        if made.nbytes + sum(kept.nbytes for kept in list(self._kept.values())) <= self._most:
            self._kept[key] = made
        elif not self._told:
            self._told = True
            log.warning(
                "keys and values of %d texts take as much as they may of %d MiB: those of others, %d MiB each, are "
                "computed in every step, which is slower; fewer --max-running-requests have room",
                len(self._kept),
                self._most >> 20,
                made.nbytes >> 20,
            )

    def _install_embedder(self, part: nn.Module, name: str) -> None:
        compute: Callable[[Tensor], Tensor] = part.forward

        @functools.wraps(compute)
        def forward(embeds: Tensor) -> Tensor:
            if name not in self._now.embedded:
                self._now.embedded[name] = compute(embeds)
            return self._now.embedded[name]

        part.forward = forward

    def _of(self, attention: Any, index: int, text: Tensor) -> Tensor:
        if index not in self._now.keys_values:
            self._now.keys_values[index] = keys_values(attention, text)
        return self._now.keys_values[index]


def _forget(kept: dict[_Key, _Kept], key: _Key, dead: weakref.ref[Tensor]) -> None:
    """One of the sources is gone; what stands under its old address may by now be another's."""
    entry = kept.get(key)
    if entry is not None and dead in entry.sources:
        kept.pop(key, None)


def supports(model: nn.Module) -> bool:
    """Whether a model is a Wan transformer as Diffusers makes it."""
    blocks = [module for module in model.modules() if isinstance(module, WanTransformerBlock)]
    return type(model).__name__ == "WanTransformer3DModel" and not any(
        attention.fused_projections for block in blocks for attention in (block.attn1, block.attn2)
    )


def keys_values(attention: Any, text: Tensor) -> Tensor:
    """Keys as ``attention`` compares them, and values, of a context [batch, tokens, width], in one tensor of two."""
    if attention.add_k_proj is None:
        return torch.stack([attention.norm_k(attention.to_k(text)), attention.to_v(text)])
    tokens = text.shape[1] - _TEXT_TOKENS
    picture, text = text[:, :tokens], text[:, tokens:]
    key = [attention.norm_added_k(attention.add_k_proj(picture)), attention.norm_k(attention.to_k(text))]
    value = [attention.add_v_proj(picture), attention.to_v(text)]
    return torch.stack([torch.cat(key, dim=1), torch.cat(value, dim=1)])


class KeptTextAttention:
    """Wan's cross-attention over `keys_values` in place of the text."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_emb: None = None,
    ) -> Tensor:
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key, value = (part.unflatten(2, (attn.heads, -1)) for part in encoder_hidden_states.unbind())
        over_picture = None
        if attn.add_k_proj is not None:
            tokens = key.shape[1] - _TEXT_TOKENS
            over_picture = self._attend(query, key[:, :tokens], value[:, :tokens], None)
            key, value = key[:, tokens:], value[:, tokens:]
        out = self._attend(query, key, value, attention_mask)
        if over_picture is not None:
            out = out + over_picture
        return attn.to_out[1](attn.to_out[0](out))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Every rank that shares the tokens has the whole text.
        out = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=self._attention_backend)
        return out.flatten(2, 3).type_as(query)


@functools.cache
def _with_text(kind: type[Any]) -> type[Any]:
    """A class of blocks as it is, but for being called with `keys_values` in place of the text.

    One for all blocks: a compiler that met another class in each would compile each of them.
    """

    class Block(kind):
        def __call__(self, hidden_states: Tensor, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(hidden_states, self.text_of(encoder_hidden_states), *args, **kwargs)

    Block.__name__ = kind.__name__
    Block.__qualname__ = kind.__qualname__
    Block.__module__ = kind.__module__
    return Block
