"""Virtual time, the chances of a plan, and a memory of what happened last."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random

from triptych.sim.coverage import Coverage, Fault
from triptych.sim.plan import Plan

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
        self.coverage = Coverage()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    @property
    def calm(self) -> bool:
        """Whether faults are over."""
        return self.now >= self.plan.calm_at

    def chance(self, probability: float) -> bool:
        """Whether something that goes wrong with this probability does so now."""
        return probability > 0 and self.now < self.plan.calm_at and self.random.random() < probability

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

    def strike(self, fault: Fault, who: str, what: object = "") -> None:
        """Count a fault that strikes now, and remember it."""
        self.coverage.faults[fault] += 1
        self.trace.append((self.now, who, (fault.value, what)))

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


class Clock:
    """The clock of one process: no two of them agree, a new life has a new origin, and it may jump ahead.

    It never steps back within a life: the shells read the monotonic clock.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ahead = 0.0

    @property
    def now(self) -> float:
        """What the process reads."""
        return self._world.now + self._ahead

    def reset(self) -> None:
        """Begin anew at another origin."""
        self._ahead = self._world.random.random() * 1000.0

    def jump(self, seconds: float) -> None:
        """Go ahead at once, as after a suspended machine wakes up."""
        self._ahead += seconds
