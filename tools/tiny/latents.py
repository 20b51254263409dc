"""Encoded clips, kept on the device with their combinations and slowly replaced by new ones while training."""

import random
import time
from typing import NamedTuple

import torch
from torch import Tensor

from tools.tiny.recipe import Bucket, Recipe
from tools.tiny.tokens import END, PAD, Bank
from tools.tiny.whole_clip import WholeClipVae
from tools.tiny.world import COUNTS, FIELDS, MOTIONS, SHAPES, render

_COMPLAINT_SHARE = 0.25
"""Of the dropped captions: replaced by a negative prompt instead of nothing."""


class Drawn(NamedTuple):
    """A batch: latents [n, 16, frames, height, width] float32, token rows [n, length], told values [n, 6]."""

    latents: Tensor
    tokens: Tensor
    told: Tensor


def _hardness(table: Tensor) -> Tensor:
    """How often each combination is drawn: turning shapes and pointed ones take longest to learn."""
    turning = table[:, FIELDS.index("motion")] == MOTIONS.index("rotating")
    star = table[:, FIELDS.index("shape")] == SHAPES.index("star")
    triangle = table[:, FIELDS.index("shape")] == SHAPES.index("triangle")
    return (1 + 0.75 * turning) * (1 + 0.3 * star + 0.15 * triangle)


class LatentPool:
    """`table` [n, 6] are the combinations trained on; `bank` holds their captions and `complaints` negative prompts."""

    def __init__(
        self, vae: WholeClipVae, recipe: Recipe, table: Tensor, bank: Bank, complaints: Tensor, seed: int
    ) -> None:
        device = vae.vae.device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.made = 0
        self._rng = random.Random(seed)
        self._vae, self._recipe, self._device = vae, recipe, device
        self._table, self._weights = table.to(device), _hardness(table).to(device)
        self._bank = Bank(*(part.to(device) for part in bank))
        self._complaints = complaints.to(device)
        self._untold = torch.tensor(COUNTS, device=device)
        config = vae.vae.config
        self._mean, self._std = (
            torch.tensor(v, device=device).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std)
        )
        count = len(recipe.buckets)
        self._latents: list[Tensor | None] = [None] * count
        self._combination = [torch.zeros(b.kept, dtype=torch.long, device=device) for b in recipe.buckets]
        self._filled, self._next = [0] * count, [0] * count

    def pick(self) -> int:
        """A bucket, as often as its share of the steps says."""
        return self._rng.choices(range(len(self._filled)), [b.share for b in self._recipe.buckets])[0]

    @torch.inference_mode()  # not just without gradients: views would be tracked, and each kind of view compiled anew
    def add(self, bucket: int) -> None:
        """Renders and encodes one batch of new clips in place of the oldest."""
        kind: Bucket = self._recipe.buckets[bucket]
        wanted = self._recipe.encode_batch * self._recipe.buckets[0].clip.pixels // kind.clip.pixels
        start = self._next[bucket]
        count = max(1, min(wanted, self._recipe.encode_batch, kind.kept - start))
        which = torch.multinomial(self._weights, count, replacement=True, generator=self.generator)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            mean, _ = self._vae.encode(render(self._table[which], kind.clip, self.generator))
        latents = ((mean - self._mean) / self._std).bfloat16()
        kept = self._latents[bucket]
        if kept is None:
            kept = self._latents[bucket] = latents.new_empty(kind.kept, *latents.shape[1:])
        kept[start : start + count] = latents
        self._combination[bucket][start : start + count] = which
        self._next[bucket] = (start + count) % kind.kept
        self._filled[bucket] = max(self._filled[bucket], start + count)
        self.made += count

    def fill(self, seconds: float) -> None:
        """Adds clips, the emptiest bucket first, until all are full or the time is over."""
        end = time.monotonic() + seconds
        kept = [b.kept for b in self._recipe.buckets]
        while min(self._filled) == 0 or time.monotonic() < end:
            shares = [filled / room for filled, room in zip(self._filled, kept, strict=True)]
            if min(shares) >= 1:
                return
            self.add(shares.index(min(shares)))
            if self._device.type == "cuda":
                torch.cuda.synchronize()

    def draw(self, bucket: int) -> Drawn:
        """Clips with one of their captions each, or with none, or with a negative prompt that means none."""
        latents = self._latents[bucket]
        assert latents is not None, "the pool is filled before it is drawn from"
        count, device = self._recipe.batch, self._device

        def integers(high: int) -> Tensor:
            return torch.randint(high, (count,), generator=self.generator, device=device)

        index = integers(self._filled[bucket])
        kind = 1 if self._recipe.buckets[bucket].clip.frames == 1 else 0
        which, text = self._combination[bucket][index], integers(self._bank.written.shape[2])
        tokens, told = self._bank.written[kind, which, text].long(), self._bank.told[kind, which, text].long()
        chance = torch.rand(count, 1, generator=self.generator, device=device)
        dropped = chance < self._recipe.caption_drop
        complaint = self._complaints[integers(len(self._complaints))].long()
        empty = torch.full_like(tokens, PAD)
        empty[:, 0] = END
        instead = torch.where(chance < self._recipe.caption_drop * _COMPLAINT_SHARE, complaint, empty)
        return Drawn(
            latents[index].float(), torch.where(dropped, instead, tokens), torch.where(dropped, self._untold, told)
        )
