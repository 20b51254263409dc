"""The router: a pure machine that takes events and a time and returns what to send, store and show.

`handle` costs the same however many requests are live: one event touches one request and one instance, and a dispatch
looks at the instances that have room. Only the loss of an instance and the expiry of timeouts walk over what they
affect.
"""

from __future__ import annotations

from typing import assert_never

from triptych.config import RouterConfig
from triptych.core.cost import Costs
from triptych.core.events import (
    CancelRequest,
    Clocks,
    FilesStored,
    InstanceExited,
    InstanceView,
    JobState,
    JobView,
    MigrateRequest,
    PauseRequest,
    Received,
    Restore,
    ResumeRequest,
    RouterAction,
    RouterEvent,
    StoreFailed,
    Submit,
    Tick,
)
from triptych.core.forecast import Forecast, Outlook
from triptych.core.integrity import check_ledger
from triptych.core.job import Job
from triptych.core.ledger import Ledger
from triptych.core.members import Member
from triptych.core.membership import Membership
from triptych.core.policies import POLICIES
from triptych.core.preemption import Preemption
from triptych.core.reports import Reports
from triptych.core.returns import Returns
from triptych.core.safekeeping import Safekeeping
from triptych.core.timeouts import timed_out
from triptych.ids import ROLES, Epoch, RequestId, Role
from triptych.wire.messages import (
    Checkpointed,
    Draining,
    Dropped,
    Fetched,
    Finished,
    FromInstance,
    Goodbye,
    Heartbeat,
    Hello,
    Kept,
    Progress,
    Staged,
    StageFailed,
    Started,
    Stopped,
)
from triptych.wire.schema import RequestSchema

_STALL = 2.0
"""Seconds between two events after which the server itself must have stood still: it ticks once a second."""

_ASIDE = 128
"""Requests that one dispatch passes over because the instances with room failed them, or are too small for them."""

_CLOCKS_INTERVAL = 5.0
"""Seconds between two notes of the time that requests have used up: what a kill of the server costs their clocks."""

_DISPATCH_ORDER: tuple[Role, ...] = tuple(reversed(ROLES))
"""Later stages first: what is nearest to its end holds the most memory and the most work."""


class Router:
    """Routes requests through encoder, denoiser and decoder instances. ``result_urls``: see `Welcome`."""

    def __init__(self, config: RouterConfig, server_epoch: Epoch, result_urls: dict[Role, str]) -> None:
        self._ledger = Ledger(config, server_epoch)
        self._returns = Returns(self._ledger)
        self._membership = Membership(self._ledger, self._returns, result_urls)
        self._safekeeping = Safekeeping(self._ledger)
        self._preemption = Preemption(self._ledger, self._safekeeping)
        costs = Costs()
        self._reports = Reports(self._ledger, self._safekeeping, costs)
        self._forecast = Forecast(self._ledger, costs)
        self._policy = POLICIES[config.dispatch_policy]
        self._last: dict[Role, int] = dict.fromkeys(ROLES, 0)
        """Ordinal of the instance that each role chose last."""
        room, queues = self._ledger.roster.open, self._ledger.queues
        self._lanes = tuple((role, room[role], queues[role]) for role in _DISPATCH_ORDER)
        self._clocks_noted = 0.0
        self._started = False

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        """Apply ``event`` at ``now`` (seconds of any monotonic clock) and return what is to be done, in order."""
        ledger = self._ledger
        stalled = self._started and now - ledger.now > _STALL
        self._started = True
        ledger.now = now
        ledger.out = []
        if stalled:
            self._membership.forgive()
        match event:
            case Received(message=message):
                self._receive(message)
            case Submit():
                if event.request in ledger.jobs:
                    ledger.count("duplicate_submit", "already live", None, event.request)
                else:
                    ledger.accept(event)
            case Restore():
                if event.request in ledger.jobs:
                    ledger.count("duplicate_submit", "already live", None, event.request)
                else:
                    self._returns.restore(event)
            case CancelRequest(request=request):
                if (job := ledger.jobs.get(request)) is not None:
                    ledger.end(job, JobState.CANCELLED)
            case PauseRequest(request=request):
                self._preemption.pause(request)
            case ResumeRequest(request=request):
                self._preemption.resume(request)
            case MigrateRequest(request=request):
                self._preemption.migrate(request)
            case FilesStored(request=request, attempt=attempt):
                self._reports.stored(request, attempt)
            case StoreFailed(request=request, attempt=attempt, error=error):
                self._reports.not_stored(request, attempt, error)
            case InstanceExited(instance=instance):
                self._membership.exited(instance)
            case Tick():
                self._membership.expire()
                self._returns.expire()
                self._time_out()
                if now - self._clocks_noted >= _CLOCKS_INTERVAL:
                    self._clocks_noted = now
                    ledger.out += self.clocks()
            case _:
                assert_never(event)
        for role, room, queue in self._lanes:
            if room and queue.by_number:
                self._dispatch(role)
        return ledger.out

    def _receive(self, message: FromInstance) -> None:
        match message:
            case (
                Fetched() | Started() | Progress() | Checkpointed() | Staged() | Finished() | StageFailed() | Stopped()
            ):
                self._reports.handle(message)
            case Hello():
                self._membership.hello(message)
            case Heartbeat():
                self._membership.heartbeat(message)
            case Goodbye():
                self._membership.goodbye(message)
            case Draining():
                self._preemption.draining(message)
            case Kept():
                self._safekeeping.kept(message)
            case Dropped():
                self._reports.dropped(message)
            case _:
                assert_never(message)

    def _time_out(self) -> None:
        ledger = self._ledger
        for request in ledger.job_deadlines.pop_due(ledger.now):
            job = ledger.jobs[request]
            ledger.end(job, *timed_out(ledger, job))

    # -- dispatch -----------------------------------------------------------------------------------------------

    def _dispatch(self, role: Role) -> None:
        ledger = self._ledger
        queue, room = ledger.queues[role], ledger.roster.open[role]
        aside: list[Job] = []
        while room and len(queue) and len(aside) < _ASIDE:
            job = queue.take()
            member = self._choose(job, role)
            if member is None:
                aside.append(job)
                continue
            self._last[role] = member.ordinal
            ledger.grant(job, member)
        for job in aside:
            queue.add(job)

    def _choose(self, job: Job, role: Role) -> Member | None:
        """The instance for a stage; None when only instances have room that failed it or were told to hand it on, while
        another one lives, or whose pools could not hold its output.

        An instance that fails at once is always free: without this rule it would draw and fail every request. For the
        same reason one in quarantine gets nothing unless there is no other.
        """
        ledger = self._ledger
        eligible = ledger.eligible(job, role)
        candidates = [member for member in ledger.roster.open[role].values() if member.id in eligible]
        avoid = job.avoid if job.moved_from is None else job.avoid | {job.moved_from}
        if avoid:
            others = [member for member in candidates if member.id not in avoid]
            if not others and not eligible <= avoid:
                return None
            candidates = others or candidates
        if job.faults and job.kills:  # two of these side by side, and nobody could say which one an instance died of
            candidates = [member for member in candidates if not member.holds_suspect]
        if not candidates:
            return None
        if role is Role.DENOISER and len(candidates) > 1:
            candidates = [m for m in candidates if job.checkpoint(m.hello.fingerprint)] or candidates
        if len(candidates) == 1:
            return candidates[0]
        return self._policy(candidates, self._last[role], self._forecast.work)

    # -- views --------------------------------------------------------------------------------------------------

    def next_deadline(self, now: float) -> float:
        """When the next `Tick` is due at the latest."""
        ledger = self._ledger
        return min(now + 1.0, ledger.job_deadlines.first(), ledger.member_deadlines.first())

    @property
    def schema(self) -> RequestSchema | None:
        """What the served model accepts; None until the first encoder has joined."""
        return self._ledger.schema

    def view(self, request: RequestId) -> JobView | None:
        """A snapshot of a live request; None when it is unknown or has ended."""
        job = self._ledger.jobs.get(request)
        return None if job is None else self._ledger.view(job)

    def immovable(self, request: RequestId) -> str | None:
        """Why `MigrateRequest` would change nothing; None when another instance can go on with the request."""
        return self._preemption.immovable(request)

    def outlook(self, request: RequestId) -> Outlook:
        """What is to be expected of a request; of one that is not live, nothing."""
        job = self._ledger.jobs.get(request)
        return Outlook() if job is None else self._forecast.outlook(job)

    def predicted_wait(self) -> float | None:
        """Seconds that a request which came now would wait in all; None when that is not known."""
        return self._forecast.wait()

    def paused(self) -> dict[RequestId, JobState]:
        """Live requests that wait until they are resumed, and their states."""
        return {job.request: job.state for job in self._ledger.jobs.values() if job.paused}

    def views(self) -> tuple[JobView, ...]:
        """Snapshots of all live requests, in order of acceptance."""
        return tuple(self._ledger.view(job) for job in self._ledger.jobs.values())

    def instances(self) -> tuple[InstanceView, ...]:
        """Snapshots of all live instances, in order of joining."""
        return tuple(member.view(self._ledger.now) for member in self._ledger.members.values())

    def queue_depths(self) -> dict[Role, int]:
        """Requests waiting for an instance, by role."""
        return {role: len(queue) for role, queue in self._ledger.queues.items()}

    def clocks(self, *, parked: bool = False) -> list[Clocks]:
        """What time every live request has used up; the ``parked`` ones, whose clocks stand still, where wanted."""
        ledger, found = self._ledger, list[Clocks]()
        for job in ledger.jobs.values():
            if parked or not job.parked:
                waited, ran = job.clocks(ledger.now)
                found.append(Clocks(request=job.request, waited=waited, ran=ran))
        return found

    def missing_roles(self) -> dict[Role, str]:
        """Roles that no live instance serves, each with the reason as far as it is known."""
        return self._ledger.roster.unserved()

    def refused(self) -> dict[str, str]:
        """Work ports of the instances that were refused lately and have not joined since, each with the reason."""
        return dict(self._ledger.roster.refused)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up. Walks over everything: for tests and idle times."""
        check_ledger(self._ledger)
