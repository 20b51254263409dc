"""Virtual time, a seeded network between named ends, and a memory of what happened last."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from triptych.core.events import Received
from triptych.core.instance_events import FromServer
from triptych.sim.plan import Plan

Message: TypeAlias = Received | FromServer
"""What the network carries: already in the form in which the receiving machine takes it."""

_TRACE = 400


class Violation(AssertionError):
    """Something that must never happen did; the message carries the way to see it again."""


class World:
    """Runs callbacks in the order of virtual time."""

    def __init__(self, seed: int, plan: Plan, random: Random) -> None:
        self.seed = seed
        self.plan = plan
        self.random = random
        self.now = 0.0
        self.trace: deque[tuple[float, str, object]] = deque(maxlen=_TRACE)
        self.intercept: Callable[[Message], bool] | None = None
        """Asked for each message; True swallows it."""
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    @property
    def calm(self) -> bool:
        """Whether faults are over."""
        return self.now >= self.plan.calm_at

    def chance(self, probability: float) -> bool:
        """Whether something that goes wrong with this probability does so now."""
        return not self.calm and probability > 0 and self.random.random() < probability

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Do ``action`` at ``when``, at once if that is past."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, action))

    def after(self, delay: float, action: Callable[[], object]) -> None:
        """Do ``action`` in ``delay`` seconds."""
        self.at(self.now + delay, action)

    def around(self, seconds: float) -> float:
        """``seconds`` give or take a third."""
        return seconds * self.random.uniform(0.67, 1.33)

    def note(self, who: str, what: object) -> None:
        """Remember something for the report of a violation."""
        self.trace.append((self.now, who, what))

    def send(self, message: Message, deliver: Callable[[Message], None]) -> None:
        """Carry ``message``: late, twice or never, as the plan has it."""
        if self.intercept is not None and self.intercept(message):
            return
        if self.chance(self.plan.drop):
            self.note("network", ("lost", message))
            return
        for _ in range(2 if self.chance(self.plan.duplicate) else 1):
            jitter = 0.0 if self.calm else self.random.random() * self.plan.jitter
            self.after(self.plan.latency + jitter, lambda: deliver(message))

    def step(self) -> bool:
        """Run the next callback; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True

    def violation(self, message: str, tail: int = 60) -> Violation:
        """An error with the last events and the command that replays them."""
        lines = [f"{when:9.4f} {who:12} {what}" for when, who, what in list(self.trace)[-tail:]]
        text = "\n".join(lines)
        return Violation(f"{message}\n{self.plan}\n{text}\nreplay: python -m triptych.sim --seed {self.seed} --trace")
