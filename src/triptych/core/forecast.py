"""When a request will start and end, and how long a new one would wait: what clients are told and what admission asks.

What stands before a request is the predicted work of everything accepted earlier, less what is done of it, shared by
the instances that serve the stage. Sums over all live requests are kept for half a second, so that many readers cost
little; requests that were accepted since are added to them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf

from triptych.core.cost import Costs, size_of
from triptych.core.job import Job
from triptych.core.ledger import Ledger
from triptych.core.members import Member
from triptych.core.states import RUNNING
from triptych.ids import ROLES, Role
from triptych.wire.messages import Record

_FRESH = 0.5
"""Seconds for which sums over all requests are used again."""


class Outlook(Record, frozen=True, kw_only=True):
    """What is to be expected of one request, in seconds from now; None: nothing is known."""

    starts_in: float | None = None
    """Until the stage that it waits for begins; None also while it runs."""
    ends_in: float | None = None
    """Until its end, waiting for later stages left out."""


@dataclass(slots=True)
class _Sums:
    """Predicted seconds of work, summed up over the requests in the order of acceptance."""

    made: float = -inf
    numbers: list[int] = field(default_factory=list[int])
    """Of the requests, ascending."""
    upto: dict[Role, list[float]] = field(default_factory=lambda: {role: [0.0] for role in ROLES})
    """By role and index: the work of all requests before that one."""
    unknown: set[Role] = field(default_factory=set[Role])
    """Roles of which some work cannot be predicted."""


class Forecast:
    """Reads the ledger and the costs that were learnt."""

    def __init__(self, ledger: Ledger, costs: Costs) -> None:
        self._ledger = ledger
        self._costs = costs
        self._sums = _Sums()

    def outlook(self, job: Job) -> Outlook:
        """What is to be expected of a live request."""
        role = job.role
        if job.parked or job.awaited is not None:
            return Outlook()
        starts_in = None
        if job.state is not RUNNING[role]:
            starts_in = self._wait(role, before=job.number)
            if starts_in is None:
                return Outlook()
        rest = [self._left(job, later) for later in ROLES[ROLES.index(role) :] if later not in job.outputs]
        known = [seconds for seconds in rest if seconds is not None]
        # A stage that never ended yet counts for nothing against steps that are known.
        if not known or rest[0] is None:
            return Outlook(starts_in=starts_in)
        return Outlook(starts_in=starts_in, ends_in=(starts_in or 0.0) + sum(known))

    def wait(self) -> float | None:
        """How long a request that came now would wait in all; None when that is not known.

        Stages of different instances work at the same time, so that the slowest group of them counts.
        """
        groups: dict[frozenset[str], list[Role]] = {}
        for role in ROLES:
            groups.setdefault(frozenset(self._ledger.roster.serving[role]), []).append(role)
        waits = [[self._wait(role, before=None) for role in roles] for roles in groups.values()]
        if any(seconds is None for group in waits for seconds in group):
            return None
        return max(sum(seconds or 0.0 for seconds in group) for group in waits)

    def work(self, member: Member) -> float:
        """Predicted seconds of what an instance's stages have yet to do; what is not known counts for nothing."""
        stages = [(grant.job, lease.role) for lease, grant in member.grants.items()]
        return sum(self._left(job, role) or 0.0 for job, role in stages if job is not None)

    def _wait(self, role: Role, *, before: int | None) -> float | None:
        """Seconds until the instances of ``role`` have done what was accepted earlier."""
        sums, workers = self._fresh(), len(self._ledger.roster.serving[role])
        if not workers or role in sums.unknown:
            return None
        index = len(sums.numbers) if before is None else bisect_left(sums.numbers, before)
        return sums.upto[role][index] / workers

    def _fresh(self) -> _Sums:
        ledger = self._ledger
        if ledger.now - self._sums.made >= _FRESH:
            self._sums = _Sums(made=ledger.now)
        sums = self._sums
        last = sums.numbers[-1] if sums.numbers else -1
        new: list[Job] = []
        for job in reversed(ledger.jobs.values()):
            if job.number <= last:
                break
            new.append(job)
        for job in reversed(new):
            sums.numbers.append(job.number)
            for role in ROLES:
                left = 0.0 if job.parked else self._left(job, role)
                if left is None:
                    sums.unknown.add(role)
                sums.upto[role].append(sums.upto[role][-1] + (left or 0.0))
        return sums

    def _left(self, job: Job, role: Role) -> float | None:
        """Predicted seconds of what a stage of a request has yet to do; None when they are unknown."""
        if role in job.outputs or job.storing is not None:
            return 0.0
        ledger, grant = self._ledger, job.grant
        if job.size is None:
            job.size = size_of(ledger.schema, job.params)
        seconds = self._costs.seconds(role, job.size)
        if role is not job.role or grant is None or grant.started is None:
            if role is Role.DENOISER and seconds is not None and job.steps:
                return seconds * (1 - job.step / job.steps)
            return seconds
        ran = ledger.now - grant.started
        if role is Role.DENOISER and job.steps:
            done = job.step - job.resumed_from
            if done > 1:  # its own pace is better than what others took
                return ran / done * (job.steps - job.step)
            return None if seconds is None else seconds * (1 - job.step / job.steps)
        return None if seconds is None else max(0.0, seconds - ran)
