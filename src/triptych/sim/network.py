"""A seeded network between named ends: late, lost, doubled and overtaken messages, and links that are cut."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from triptych.core.events import Received
from triptych.core.instance_events import FromServer
from triptych.sim.coverage import Fault
from triptych.sim.world import World

Message: TypeAlias = Received | FromServer
"""What the network carries: already in the form in which the receiving machine takes it."""

SERVER = "server"
"""Name of the server's end."""

_LATE = 0.05
"""Seconds beyond the latency from which on a message counts as delayed."""


@dataclass(frozen=True, slots=True)
class _Partition:
    side: frozenset[str]
    until: float
    holds: bool
    """What is sent across arrives when the cut is over; otherwise it is lost."""


class Network:
    """Carries messages from end to end as the plan of its world has it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._partitions: list[_Partition] = []
        self._latest: dict[tuple[str, str], float] = {}
        """When the last message of each link arrives."""
        self._late_until = 0.0
        """When the last message that was held up arrives."""
        self.intercept: Callable[[Message], bool] | None = None
        """Asked for each message; True swallows it."""

    def send(self, source: str, target: str, message: Message, deliver: Callable[[Message], None]) -> None:
        """Carry ``message``: late, twice or never, as the plan has it."""
        world, plan = self._world, self._world.plan
        if self.intercept is not None and self.intercept(message):
            return
        cut = self._between(source, target) if self._partitions else None
        if (cut is not None and not cut.holds) or world.chance(plan.drop):
            world.strike(Fault.MESSAGE_LOST, "network", message)
            return
        held = 0.0 if cut is None else cut.until - world.now
        copies = 1
        if world.chance(plan.duplicate):
            world.strike(Fault.MESSAGE_DUPLICATED, "network", message)
            copies = 2
        for _ in range(copies):
            jitter = held if world.calm else held + world.random.random() * plan.jitter
            if jitter > _LATE:
                world.coverage.faults[Fault.MESSAGE_DELAYED] += 1
                self._late_until = max(self._late_until, world.now + plan.latency + jitter)
            arrival = world.now + plan.latency + jitter
            if arrival < self._latest.get((source, target), 0.0):
                world.coverage.faults[Fault.MESSAGES_REORDERED] += 1
            else:
                self._latest[source, target] = arrival
            world.at(arrival, lambda: deliver(message))

    def cut(self, side: Collection[str], seconds: float, *, holds: bool) -> None:
        """Let nothing pass between the ends of ``side`` and all others for a while."""
        self._world.strike(Fault.PARTITION, "network", (sorted(side), seconds))
        self._partitions.append(_Partition(frozenset(side), self._world.now + seconds, holds))

    @property
    def whole(self) -> bool:
        """Whether nothing is cut, and nothing is still under way that was held up."""
        return self._late_until < self._world.now and all(
            partition.until <= self._world.now for partition in self._partitions
        )

    def connected(self, source: str, target: str) -> bool:
        """Whether a connection between two ends works at present."""
        return not self._partitions or self._between(source, target) is None

    def _between(self, source: str, target: str) -> _Partition | None:
        now = self._world.now
        self._partitions = [partition for partition in self._partitions if partition.until > now]
        for partition in self._partitions:
            if (source in partition.side) != (target in partition.side):
                return partition
        return None
