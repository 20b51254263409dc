"""Whether an instance can be trusted with requests: what it failed lately, and how long others are preferred for that.

An instance that fails several different requests in a row gets nothing for a while, as long as another one serves its
role. When that time is over, the next failure is one too many again, and a success clears everything. A new process
begins with a clean record unless the one before died of a request.

A request that another instance fails too, against which nothing else is held, is poor evidence: whoever repeats a
request that cannot be computed would have one instance after another set aside. It is not forgotten, though. Instances
may break of one cause at once, and would clear each other for ever; so some such failures count as one of the others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from triptych.ids import Epoch, InstanceId, RequestId

LONGEST = 600.0
"""Seconds that a quarantine lasts at most; each one that follows another without a success between is twice as long."""

_SHARED = 3
"""Failures that a sound instance had too, for one that it did not have."""
_MOST_DOUBLINGS = 16
"""Of a quarantine, which is at its longest by then."""
_REMEMBERED = 1024
"""Instances whose record outlives their process."""


@dataclass(kw_only=True, slots=True, eq=False)
class Health:
    """The record of one instance. Times are in seconds of the router's clock."""

    failed: OrderedDict[RequestId, str] = field(default_factory=OrderedDict[RequestId, str])
    """Different requests that failed here in a row, the latest last, each with the reason."""
    shared: OrderedDict[RequestId, str] = field(default_factory=OrderedDict[RequestId, str])
    """The same of those that a sound instance failed too."""
    proven: bool = False
    """It has done a stage in this life."""
    until: float = -inf
    """When the latest quarantine ends."""
    evidence: str = ""
    """What the latest quarantine is for."""
    rounds: int = 0
    """Quarantines without a success between."""

    def fail(self, request: RequestId, reason: str, now: float, *, limit: int, cooldown: float) -> bool:
        """Book a failure; whether it puts the instance into quarantine."""
        if not self.quarantined(now):
            while self._enough(limit):  # what the quarantine before this failure was for
                (self.shared or self.failed).popitem(last=False)
        self.shared.pop(request, None)
        self.failed[request] = reason
        self.failed.move_to_end(request)
        if not self._enough(limit) or self.quarantined(now):
            return False
        held = [*self.shared.items(), *self.failed.items()]
        self.evidence = "; ".join(f"{request}: {reason}" for request, reason in held)
        self.until = now + min(LONGEST, cooldown * 2.0 ** min(self.rounds, _MOST_DOUBLINGS))
        self.rounds += 1
        return True

    def pardon(self, request: RequestId, now: float, *, limit: int) -> None:
        """The failure of that request was another's fault."""
        self.failed.pop(request, None)
        self._acquit(now, limit)

    def share(self, request: RequestId, now: float, *, limit: int) -> None:
        """A sound instance has failed of that request too."""
        if (reason := self.failed.pop(request, None)) is not None:
            self.shared[request] = reason
            self._acquit(now, limit)

    def sound(self, *, but: RequestId) -> bool:
        """Whether it has shown that it can serve, and nothing ``but`` that request is held against it."""
        return self.proven and not self.failed.keys() - {but}

    def succeed(self) -> None:
        """It has done a stage: whatever was wrong is over."""
        self.proven = True
        if self.failed or self.shared or self.rounds:
            self.failed.clear()
            self.shared.clear()
            self.rounds = 0
            self.until = -inf

    def _enough(self, limit: int) -> bool:
        """Whether what is held against it is enough for a quarantine."""
        return len(self.failed) * _SHARED + len(self.shared) >= limit * _SHARED

    def _acquit(self, now: float, limit: int) -> None:
        """End a quarantine that what is left would not have been enough for."""
        if self.quarantined(now) and not self._enough(limit):
            self.until = -inf
            self.rounds -= 1

    def quarantined(self, now: float) -> bool:
        """Whether it gets nothing while another instance serves its role."""
        return now < self.until


class Records:
    """The records of instances that are gone."""

    def __init__(self) -> None:
        self._records: OrderedDict[InstanceId, tuple[Epoch | None, Health]] = OrderedDict()

    def leave(self, instance: InstanceId, epoch: Epoch, health: Health, *, fatal: bool) -> None:
        """Keep the record of a life for when it comes back; for the next life too if this one died of a request."""
        self._records[instance] = (None if fatal else epoch, health)
        self._records.move_to_end(instance)
        if len(self._records) > _REMEMBERED:
            self._records.popitem(last=False)

    def join(self, instance: InstanceId, epoch: Epoch) -> Health:
        """The record with which an instance joins."""
        before = self._records.pop(instance, None)
        return before[1] if before is not None and before[0] in (None, epoch) else Health()
