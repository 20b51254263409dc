"""Whether an instance can be trusted with requests: what it failed lately, and how long others are preferred for that.

An instance that fails several different requests in a row gets nothing for a while, as long as another one serves its
role. When that time is over, the next failure is one too many again, and a success clears everything. A new process
begins with a clean record unless the one before died of a request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from triptych.ids import Epoch, InstanceId, RequestId

LONGEST = 600.0
"""Seconds that a quarantine lasts at most; each one that follows another without a success between is twice as long."""

_MOST_DOUBLINGS = 16
"""Of a quarantine, which is at its longest by then."""
_REMEMBERED = 1024
"""Instances whose record outlives their process."""


@dataclass(kw_only=True, slots=True, eq=False)
class Health:
    """The record of one instance. Times are in seconds of the router's clock."""

    failed: OrderedDict[RequestId, str] = field(default_factory=OrderedDict[RequestId, str])
    """Different requests that failed here in a row, the latest last, each with the reason."""
    until: float = -inf
    """When the latest quarantine ends."""
    evidence: str = ""
    """What the latest quarantine is for."""
    rounds: int = 0
    """Quarantines without a success between."""

    def fail(self, request: RequestId, reason: str, now: float, *, limit: int, cooldown: float) -> bool:
        """Book a failure; whether it puts the instance into quarantine."""
        self.failed[request] = reason
        self.failed.move_to_end(request)
        if len(self.failed) < limit or self.quarantined(now):
            return False
        self.evidence = "; ".join(f"{request}: {reason}" for request, reason in self.failed.items())
        self.until = now + min(LONGEST, cooldown * 2.0 ** min(self.rounds, _MOST_DOUBLINGS))
        self.rounds += 1
        while len(self.failed) >= limit:
            self.failed.popitem(last=False)
        return True

    def pardon(self, request: RequestId) -> None:
        """The failure of that request was another's fault."""
        self.failed.pop(request, None)

    def succeed(self) -> None:
        """It has done a stage: whatever was wrong is over."""
        if self.failed or self.rounds:
            self.failed.clear()
            self.rounds = 0
            self.until = -inf

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
