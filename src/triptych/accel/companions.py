"""Whose step is computed when: of requests that share forwards, as many at once as pay off, and kinds take turns.

Requests that do not fit into a forward gain nothing by taking turns with those that do: all of them would end when the
last one does. So they wait for those of their kind that take precedence (`triptych.worker.precedence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from triptych.accel.batching import ForwardBatcher, Kind

Calls: TypeAlias = tuple[Kind, ...]
"""What a step of a request called; empty before its first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Companions:
    """Numbers of the requests that are to advance together, and of those of their kind that have to wait."""

    advance: list[int]
    wait: list[int]


def companions(steps: Sequence[Calls], turn: int, batcher: ForwardBatcher) -> Companions:
    """Who advances when it is the turn of request number ``turn``. ``steps`` has the last step of each, those first
    that take precedence.

    One whose first step is to come always advances: only that shows of which kind it is.
    """
    new = [number for number, calls in enumerate(steps) if not calls]
    mine = steps[turn]
    if not mine:
        return Companions(advance=list(range(len(steps))), wait=[])
    alike = [number for number, calls in enumerate(steps) if calls and _names(calls) == _names(mine)]
    most = _most(mine, [steps[number] for number in alike], batcher)
    if most == 1 and any(_lengths(steps[number]) != _lengths(mine) for number in alike):
        # Texts of several lengths in one forward do not pay off. Those of one length may.
        alike = [number for number in alike if _lengths(steps[number]) == _lengths(mine)]
        most = _most(mine, [mine] * len(alike), batcher)
    return Companions(advance=sorted({*alike[:most], *new}), wait=alike[most:])


def _most(mine: Calls, alike: Sequence[Calls], batcher: ForwardBatcher) -> int:
    """How many steps like these share their forwards at most; all where that is not known. A step may call several
    models: it is worth it if it is for one of them."""
    caps = [batcher.joined_at_most([calls[index] for calls in alike]) for index in range(len(mine))]
    return max(len(alike) if cap is None else cap for cap in caps)


def _names(calls: Calls) -> list[object]:
    return [kind.key for kind in calls]


def _lengths(calls: Calls) -> list[tuple[int, ...]]:
    return [kind.lengths for kind in calls]
