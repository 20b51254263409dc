"""Tensors joined along their batch dimension, the same ones as one and the same tensor.

In every step of a request the same texts come together. What is kept of a text from step to step is found by its
tensor, so it must not be another one each time. What comes together a second time is kept from then on, until one of
the parts is gone or was written to; latents, which are others in each step, never are.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

_Key: TypeAlias = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class _Known:
    """Parts that have come together."""

    parts: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    whole: Tensor | None = None
    version: int = 0
    """Of the whole, when it was made."""


class Merged:
    """What was joined lately. Used from one thread."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}

    def __len__(self) -> int:
        """How many combinations are remembered."""
        return len(self._known)

    def of(self, parts: tuple[Tensor, ...]) -> Tensor:
        """``parts`` along their first dimension; of several lengths in the second, zeros follow in the shorter ones."""
        if any(part.is_inference() for part in parts):  # which does not say when it changes
            return _together(parts)
        key, versions = tuple(map(id, parts)), tuple(part._version for part in parts)
        known = self._known.get(key)
        if known is None or known.versions != versions:
            forget = functools.partial(self._forget, key)
            self._known[key] = _Known(parts=tuple(weakref.ref(part, forget) for part in parts), versions=versions)
            return _together(parts)
        if known.whole is None or known.whole._version != known.version:
            known.whole = _together(parts)
            known.version = known.whole._version
        return known.whole

    def _forget(self, key: _Key, dead: weakref.ref[Tensor]) -> None:
        """One of the parts is gone; what stands under its old address may by now be another's."""
        known = self._known.get(key)
        if known is not None and any(part is dead for part in known.parts):
            del self._known[key]


def _together(parts: tuple[Tensor, ...]) -> Tensor:
    longest = max(part.shape[1] for part in parts) if parts[0].ndim > 1 else 0
    if any(part.ndim > 1 and part.shape[1] < longest for part in parts):
        parts = tuple(_longer(part, longest) for part in parts)
    return torch.cat(parts)


def _longer(part: Tensor, length: int) -> Tensor:
    padding = part.new_zeros((part.shape[0], length - part.shape[1], *part.shape[2:]))
    return torch.cat([part, padding], dim=1)
