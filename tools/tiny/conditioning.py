"""How captions reach the transformer in training: without host syncs, without long paddings, and told by name."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from tools.tiny.tokens import PAD
from tools.tiny.world import COUNTS


def encode_text(text_encoder: UMT5EncoderModel, tokens: Tensor) -> Tensor:
    """Token rows [n, length] -> states [n, length, width], zero on padding as `WanPipeline` has them.

    Given token ids and a flat mask, the library asks on the host whether the mask is all ones, at every call; and the
    gradient of an embedding lookup sorts. One-hot products and a ready-made 4D mask leave nothing to ask or to sort.
    """
    table = text_encoder.get_input_embeddings().weight
    kept = tokens != PAD
    with torch.autocast(tokens.device.type, enabled=False):
        embedded = (tokens[..., None] == torch.arange(len(table), device=tokens.device)).to(table.dtype) @ table
    mask = torch.where(kept, 0.0, -1e9)[:, None, None, :]
    if torch.is_autocast_enabled(tokens.device.type):
        mask = mask.to(torch.get_autocast_dtype(tokens.device.type))
    states = text_encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    return states.float() * kept[..., None]


def padding_weight(tokens: Tensor, length: int) -> Tensor:
    """What to add to the cross-attention scores [n, 1, 1, tokens] so that `tokens` act as if padded to `length`.

    The pipeline pads the text with zero states up to its max_sequence_length and lets the transformer attend to all of
    them. They are equal keys with equal values, so k of them, each weighted by m / k, act exactly like m.
    """
    padding = tokens == PAD
    here = padding.sum(1, keepdim=True).clamp(min=1)
    wanted = (here + length - tokens.shape[1]).clamp(min=1)
    return torch.where(padding, (wanted / here).log(), 0.0)[:, None, None, :]


class WeightedTextAttention:
    """Cross-attention of a transformer in training: stock, with `padding_weight` added to the scores."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
        rotary_emb: None = None,
    ) -> Tensor:
        query = attn.norm_q(attn.to_q(hidden_states))
        key = attn.norm_k(attn.to_k(encoder_hidden_states))
        value = attn.to_v(encoder_hidden_states)
        query, key, value = (
            x.to(value.dtype).unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value)
        )
        weight = self.weight
        assert weight is not None, "set before each forward"
        mask = weight.to(value.dtype).expand(-1, -1, query.shape[2], -1)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attn.to_out[0](found.transpose(1, 2).flatten(2))

    def attach(self, transformer: WanTransformer3DModel) -> None:
        for block in transformer.blocks:
            block.attn2.set_processor(self)


class Told(NamedTuple):
    loss: Tensor
    accuracy: Tensor
    """Share of captions of which every attribute is read rightly."""


class Probe(nn.Module):
    """Reads off the last token's state which value of each attribute the caption tells, or that it tells none.

    Used in training only. Without it the words of both colours reach the transformer, but which of them is the
    background's stays open for most of the run.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._sizes = [count + 1 for count in COUNTS]
        self.read = nn.Linear(width, sum(self._sizes))

    def forward(self, states: Tensor, tokens: Tensor, told: Tensor) -> Told:
        last = (tokens != PAD).sum(1) - 1
        is_last = torch.arange(tokens.shape[1], device=tokens.device) == last[:, None]
        scores = self.read((states * is_last[..., None]).sum(1)).float().split(self._sizes, 1)
        loss = torch.stack([F.cross_entropy(s, want) for s, want in zip(scores, told.T, strict=True)]).mean()
        right = torch.stack([s.argmax(1) == want for s, want in zip(scores, told.T, strict=True)]).all(0)
        return Told(loss, right.float().mean())
