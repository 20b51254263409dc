"""Tokens of any number shared by ranks that all compute equally many.

Each rank has a window of tokens, as many as there must be in the largest of equal parts. Where the number does not
divide, windows overlap, and what two of them have is computed twice instead of tokens that there are none of: whatever
looks at one token alone is right for all of them, and nothing has to be invented. Where tokens look at each other, each
may be seen once: `once` says which places of all windows to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def window(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's window of ``length`` tokens begins, and how many tokens it has: equally many on all ranks.

    There is nothing to decide here, so that a compiler for which lengths are symbols makes one graph for all.
    """
    return length * rank // ranks, (length + ranks - 1) // ranks


def once(lengths: Sequence[int], ranks: int, device: torch.device) -> torch.Tensor | None:
    """Places at which each token stands once, where the ranks' windows are put one after the other.

    A rank's window is that of several streams, whose ``lengths`` these are, one after the other. None where they
    divide, so that all places are such. int64 [sum of lengths].
    """
    if not any(length % ranks for length in lengths):
        return None
    return torch.cat([torch.arange(first, last, device=device) for first, last in _runs(lengths, ranks)])


def _runs(lengths: Sequence[int], ranks: int) -> Iterator[tuple[int, int]]:
    """First place, and the one after the last, of what each window has before the next one begins."""
    place = 0
    for rank in range(ranks):
        for length in lengths:
            start, size = window(length, rank, ranks)
            yield place, place + window(length, rank + 1, ranks)[0] - start
            place += size
