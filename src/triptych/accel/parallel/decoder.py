"""A Wan VAE's pictures decoded in strips, one on each rank, and put together on rank 0.

What lies deep in the decoder is cheap and looks at whole frames (the attention there), so every rank computes it. From
the first upsampling block on, a rank keeps its strip and beside it as many rows as the layers that are still to come
can see, at each resolution no more than that: its own rows are then those of the whole picture, without anything being
exchanged before they are done. At the edges of the frame the layers pad as they always do; what the inner edges of a
strip's margin get wrong never reaches the strip.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triptych.accel.parallel.team import Team
from triptych.accel.wan_vae import WanVaeDecoder, install, installed


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows ``start`` to ``stop`` of the ``size`` rows that latents have along ``dim``.

    ``levels`` are, for each upsampling block, how many rows a row of latents has become before it and how many rows
    beside the strip it needs; ``scale`` is how many it becomes in the end.
    """

    dim: int
    start: int
    stop: int
    size: int
    levels: tuple[tuple[int, int], ...]
    scale: int

    def before(self, x: Tensor, level: int) -> Tensor:
        """Of what comes to upsampling block ``level``, what it needs: all of it before the first."""
        first, last = self._kept(level)
        begun = 0
        if level:
            begun = self._kept(level - 1)[0] * self.levels[level][0] // self.levels[level - 1][0]
        return x.narrow(self.dim, first - begun, last - first).contiguous(memory_format=torch.channels_last_3d)

    def done(self, pixels: Tensor) -> Tensor:
        """The strip itself, of what the last block and the head have made."""
        first = self._kept(len(self.levels) - 1)[0] * self.scale // self.levels[-1][0]
        return pixels.narrow(self.dim, self.start * self.scale - first, (self.stop - self.start) * self.scale)

    def _kept(self, level: int) -> tuple[int, int]:
        """The rows that are kept before a block, in its own resolution; even ones, so that they can be halved."""
        scale, margin = self.levels[level]
        return max(0, self.start * scale - margin), min(self.size * scale, self.stop * scale + margin)


class DecodeSharing:
    """How the decoder of one model is shared by ``size`` ranks, of which this is number ``rank``."""

    def __init__(self, decoder: Any, rank: int, size: int, gather: Callable[[Tensor, Strip], Tensor]) -> None:
        """``decoder`` is the VAE's. ``gather`` makes whole pictures of all ranks' strips, where these are wanted."""
        self._levels, self._scale = _levels(decoder)
        self._rank = rank
        self._size = size
        self._gather = gather

    def strip(self, latents: Tensor) -> Strip | None:
        """This rank's strip of [batch, channels, frames, height, width], across the longer side; None when there are
        fewer rows than ranks, so that every rank computes them all."""
        height, width = latents.shape[3:]
        size = max(height, width)
        if size < self._size:
            return None
        return Strip(
            dim=3 if height >= width else 4,
            start=size * self._rank // self._size,
            stop=size * (self._rank + 1) // self._size,
            size=size,
            levels=self._levels,
            scale=self._scale,
        )

    def whole(self, pixels: Tensor, strip: Strip) -> Tensor:
        """Whole pictures of the strips that all ranks have just made; on other ranks than 0 their own strip."""
        return self._gather(strip.done(pixels), strip)


def _levels(decoder: Any) -> tuple[tuple[tuple[int, int], ...], int]:
    """For each upsampling block: rows that a row of latents has become, and margin before it; and rows in the end."""
    needed, backwards = 1, list[int]()  # the last convolution sees one row beside
    for up in reversed(decoder.up_blocks):
        if up.upsamplers is not None:
            needed = (needed + 2) // 2  # one more row of twice as many
        needed += 2 * len(up.resnets)
        backwards.append(needed)
    scale, levels = 1, list[tuple[int, int]]()
    for up, margin in zip(decoder.up_blocks, reversed(backwards), strict=True):
        levels.append((scale, margin))
        if up.upsamplers is not None:
            scale *= 2
    return tuple(levels), scale


def share_decoder(team: Team, vae: Any) -> None:
    """Have ``vae`` decode in strips. All ranks do this, and each decode, at the same time."""
    group = team.everyone().get_group()

    def gather(own: Tensor, strip: Strip) -> Tensor:
        rows = [strip.size * rank // team.size for rank in range(team.size + 1)]
        lengths = [(last - first) * strip.scale for first, last in itertools.pairwise(rows)]
        packed = pack(own, strip.dim, max(lengths))
        parts = [torch.empty_like(packed) for _ in lengths] if team.rank == 0 else None
        dist.gather(packed, parts, dst=0, group=group)
        return own if parts is None else unpack(parts, strip.dim, lengths)

    decoder = installed(vae)
    if decoder is None:
        decoder = WanVaeDecoder(vae)
        install(vae, decoder)
    decoder.sharing = DecodeSharing(vae.decoder, team.rank, team.size, gather)


def pack(own: Tensor, dim: int, length: int) -> Tensor:
    """A strip with rows of zeros behind it up to ``length``: of one size, and in one order in memory, on all ranks."""
    shape = [length if d == dim else n for d, n in enumerate(own.shape)]
    packed = torch.zeros(shape, dtype=own.dtype, device=own.device)
    packed.narrow(dim, 0, own.shape[dim]).copy_(own)
    return packed


def unpack(parts: Sequence[Tensor], dim: int, lengths: Sequence[int]) -> Tensor:
    """The strips that were packed into ``parts``, one after the other."""
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)
