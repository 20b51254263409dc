"""Dispatch policies: which of the instances that have room takes the next stage. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from triptych.config import DispatchPolicy


class Candidate(Protocol):
    """What a policy sees of an instance that has room."""

    @property
    def ordinal(self) -> int:
        """Order of joining."""
        ...

    @property
    def free(self) -> int:
        """Free slots, at least 1."""
        ...


C = TypeVar("C", bound=Candidate)


def round_robin(candidates: Iterable[C], last: int, work: Callable[[C], float]) -> C:
    """The next one in joining order after the instance with ordinal ``last``, which was chosen before."""
    return min(candidates, key=lambda c: (c.ordinal <= last, c.ordinal))


def max_free_slots(candidates: Iterable[C], last: int, work: Callable[[C], float]) -> C:
    """The one with the most free slots; among equals the next in joining order."""
    return min(candidates, key=lambda c: (-c.free, c.ordinal <= last, c.ordinal))


def least_work(candidates: Iterable[C], last: int, work: Callable[[C], float]) -> C:
    """The one whose stages will take the fewest seconds yet, so that none waits behind a long one while another
    instance is nearly done; among equals the one with the most free slots."""
    return min(candidates, key=lambda c: (work(c), -c.free, c.ordinal <= last, c.ordinal))


class Policy(Protocol):
    """Chooses one of at least one candidates. ``work`` foretells how many seconds of work each has yet to do."""

    def __call__(self, candidates: Iterable[C], last: int, work: Callable[[C], float]) -> C: ...


POLICIES: dict[DispatchPolicy, Policy] = {
    "round_robin": round_robin,
    "max_free_slots": max_free_slots,
    "least_work": least_work,
}
