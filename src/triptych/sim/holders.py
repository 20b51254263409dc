"""Who holds which lease, over all instances: no two may hold the same attempt of one server life."""

from __future__ import annotations

from typing import TypeAlias

from triptych.ids import Epoch, InstanceId
from triptych.sim.world import World
from triptych.wire.messages import Lease

Held: TypeAlias = tuple[Epoch | None, Lease]
"""A lease, and the server life that gave it."""


class Holders:
    """Told by each instance whenever its leases have changed, so that every change is checked at its moment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._holder: dict[Held, InstanceId] = {}
        self._held: dict[InstanceId, frozenset[Held]] = {}

    def update(self, instance: InstanceId, held: frozenset[Held]) -> None:
        """Note what an instance holds now. Raises `Violation` when another one holds some of it."""
        before = self._held.get(instance, frozenset())
        for key in before - held:
            del self._holder[key]
        for key in held - before:
            other = self._holder.setdefault(key, instance)
            if other != instance:
                raise self._world.violation(f"held by two instances, {other} and {instance}: {key[1]}")
        self._held[instance] = held
