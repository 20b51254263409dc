"""The pool of instances as the server shows it: whether it can serve, who is up, how full it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.core.events import JobState
from triptych.core.router import Router
from triptych.ids import ROLES, Epoch, InstanceId, Role
from triptych.server.info import describe_pool
from triptych.server.metrics import Gauges
from triptych.server.readiness import Addresses, Attendance, Readiness

KNOWN_INSTANCES = 256
"""Instances, live or gone, whose up or down is shown in the metrics."""


class PoolView:
    """What can be said of the router's instances. ``named``: the work ports that the server was told to wait for."""

    def __init__(self, router: Router, named: Mapping[Role, Sequence[str]]) -> None:
        self._router = router
        self._addresses = Addresses()
        self._attendance = Attendance(named, self._addresses)
        self._known: dict[InstanceId, None] = {}
        self._resolving = False

    def look(self) -> bool:
        """See who is there, about once a second, so that it is known also while nobody asks. Whether there are host
        names to `resolve`."""
        for instance in self._router.instances():
            self._known.pop(instance.instance, None)
            self._known[instance.instance] = None
        while len(self._known) > KNOWN_INSTANCES:
            del self._known[next(iter(self._known))]
        self.readiness()
        return self._addresses.stale and not self._resolving

    async def resolve(self) -> None:
        """Look host names up, aside."""
        self._resolving = True
        try:
            await asyncio.to_thread(self._addresses.resolve)
        finally:
            self._resolving = False

    def readiness(self) -> Readiness:
        """Whether every role has a live instance and every named instance has come once; reasons name what is missing,
        also what can be done without."""
        return self._attendance.judge(self._router.instances(), self._router.missing_roles(), self._router.refused())

    def largest(self, role: Role) -> int | None:
        """Bytes of the largest transfer pool of a role's instances; None while there is none."""
        return max((i.pool_bytes for i in self._router.instances() if role in i.roles), default=None)

    def describe(self, name: Callable[[Epoch], str]) -> dict[str, Any]:
        """Roles and instances as plain JSON values; ``name``: what to call a life of an instance."""
        return describe_pool(self._router.instances(), self._router.queue_depths(), name)

    def gauges(self, states: Mapping[JobState, int], failing: Mapping[str, bool]) -> Gauges:
        """The numbers of a scrape; ``states``: of the requests; ``failing``: of the stores."""
        instances = self._router.instances()
        live = {instance.instance for instance in instances}
        return Gauges(
            states=states,
            failing=failing,
            queues=self._router.queue_depths(),
            slots_used={r: sum(len(i.leases) for i in instances if r in i.roles) for r in ROLES},
            slots_free={r: sum(i.free_slots for i in instances if r in i.roles) for r in ROLES},
            up={instance: instance in live for instance in (*self._known, *live)},
            counts={instance.instance: instance.counts for instance in instances},
            quarantined={i.instance: i.quarantined > 0 for i in instances},
        )
