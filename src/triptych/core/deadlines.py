"""Deadlines of many things at once: set, move and drop in logarithmic time, and never more memory than they need."""

from __future__ import annotations

import heapq
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=str)

_SLACK = 64


class Deadlines(Generic[K]):
    """At most one deadline a key. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._when)

    def set(self, key: K, when: float) -> None:
        """Give ``key`` this deadline, instead of the one that it has."""
        if self._when.get(key) == when:
            return
        self._when[key] = when
        heapq.heappush(self._heap, (when, key))
        # Moved and dropped deadlines stay in the heap until they surface; most would surface only after minutes.
        if len(self._heap) > 2 * len(self._when) + _SLACK:
            self._heap = [(when, key) for key, when in self._when.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Forget the deadline of ``key``, if it has one."""
        self._when.pop(key, None)

    def first(self) -> float:
        """The earliest deadline; infinity when there is none."""
        heap, when = self._heap, self._when
        while heap and when.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadlines have come, earliest first."""
        due: list[K] = []
        while self.first() <= now and self._heap:
            key = heapq.heappop(self._heap)[1]
            del self._when[key]
            due.append(key)
        return due
