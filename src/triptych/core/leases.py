"""The leases of an instance: each from the first word of it until the server has acknowledged its end."""

from __future__ import annotations

from collections import OrderedDict
from typing import assert_never

from triptych.core.events import Count, CountName
from triptych.core.instance_events import (
    Abort,
    CheckpointMade,
    ComputeStarted,
    Forget,
    FromServer,
    InstanceAction,
    KeepCopy,
    Pulled,
    PullFailed,
    ReleaseCopies,
    Report,
    StartCompute,
    StartPull,
    Stepped,
    Suspend,
)
from triptych.core.shelf import Shelf
from triptych.core.voice import Voice
from triptych.core.work import LONGEST_RESEND_INTERVAL, PROGRESS_INTERVAL, Phase, Work
from triptych.ids import (
    CopyId,
    Role,
)
from triptych.wire.messages import (
    Ack,
    Cancel,
    DrainStatus,
    ErrorInfo,
    Finished,
    FromInstance,
    Hello,
    Keep,
    Lease,
    Outcome,
    Pull,
    Refused,
    Release,
    RunStage,
    Staged,
    Unknown,
    Welcome,
    replace,
)

_REMEMBERED = 1024
"""Leases that are remembered as over."""

_COMPUTING = (Phase.COMPUTING, Phase.SUSPENDING)


class Leases:
    """Part of the instance machine, which sets ``now`` and ``out`` for each event: actions are left in ``out``."""

    def __init__(self, hello: Hello, voice: Voice) -> None:
        self._hello = hello
        self._voice = voice
        self._over: OrderedDict[Lease, None] = OrderedDict()
        self.works: dict[Lease, Work] = {}
        self.shelf = Shelf()
        self.out: list[InstanceAction] = []
        self.now = 0.0

    def forget_over(self) -> None:
        """Forget which leases are over."""
        self._over.clear()

    # -- work from the server --------------------------------------------------------------------------------------

    def work(self, event: FromServer) -> None:
        """What the server asks of the instance, once it is certain which server speaks."""
        match event.message:
            case RunStage() as message:
                self._run(message, event.blobs)
            case Cancel(lease=lease, keep=keep):
                self._cancel(lease, keep=keep)
            case Keep(manifest=manifest, spare=spare):
                self.out.append(KeepCopy(manifest=manifest, spare=spare))
            case Release(copies=copies):
                self.shelf.remove(copies)
                self.out.append(ReleaseCopies(copies=copies))
            case Ack(leases=leases):
                self._acknowledged(leases)
            case Welcome() | Refused() | Unknown() | DrainStatus():
                raise AssertionError("membership is not work")
            case _:
                assert_never(event.message)

    def _run(self, message: RunStage, blobs: tuple[bytes, ...]) -> None:
        lease = message.lease
        if lease in self.works or lease in self._over:
            self.count("repeated_lease", f"{lease.role} attempt {lease.attempt}", lease)
            return
        slots = self._hello.slots
        if len(self.works) >= slots:  # those that have ended and await their acknowledgement take no slot
            active = sum(work.outcome is None for work in self.works.values())
            if active >= slots:
                self.count("slots_exceeded", f"{active} leases in {slots} slots", lease)
        work = Work(lease=lease, params=message.params, blobs=blobs, budget_seconds=message.budget_seconds)
        self.works[lease] = work
        if lease.role not in self._hello.roles:
            roles = ", ".join(self._hello.roles)
            reason = f"role={lease.role}: this instance serves {roles}"
            error = ErrorInfo(code="wrong_role", message=reason, blame="us", retryable=True)
            self.ended(self._voice.failed(lease, error))
        elif message.inputs:
            self.out.append(StartPull(lease=lease, inputs=message.inputs, resume=message.resume))
        else:
            self._compute(work)

    def _compute(self, work: Work) -> None:
        work.phase = Phase.COMPUTING
        self.out.append(
            StartCompute(lease=work.lease, params=work.params, blobs=work.blobs, budget_seconds=work.budget_seconds)
        )
        work.blobs = ()

    def _cancel(self, lease: Lease, *, keep: bool) -> None:
        work = self.works.get(lease)
        if work is None:
            # Remembered, so that a lease which this cancel has overtaken is not begun.
            self._remember(lease)
            self.report(lease.role, self._voice.stopped(lease))
        elif work.outcome is not None:
            self.report_outcome(work)
        elif keep and work.phase is not Phase.PULLING:
            if work.phase is Phase.COMPUTING:
                self.suspend(work)
        elif work.phase is not Phase.ABORTING:
            work.phase = Phase.ABORTING
            self.out.append(Abort(lease=lease))

    def suspend(self, work: Work) -> None:
        """Have a lease stopped between two steps, unless it is finished before."""
        work.phase = Phase.SUSPENDING
        self.out.append(Suspend(lease=work.lease))

    def _acknowledged(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            if (work := self.works.get(lease)) is not None and work.outcome is not None:
                del self.works[lease]
                self._remember(lease)
                self.out.append(Forget(lease=lease))

    def _remember(self, lease: Lease) -> None:
        self._over[lease] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    # -- word from the worker's threads ----------------------------------------------------------------------------

    def pulled(self, event: Pulled) -> None:
        """Its inputs are here: compute, unless it is stopped meanwhile."""
        work = self.works.get(event.lease)
        if work is None or work.phase is not Phase.PULLING:
            return  # aborted meanwhile: the worker answers the abort
        work.pull = Pull(seconds=event.seconds, nbytes=event.nbytes, plane=event.plane)
        self.report(event.lease.role, self._voice.fetched(event))
        self._compute(work)

    def pull_failed(self, event: PullFailed) -> None:
        """An input could not be had: that is its end."""
        work = self.works.get(event.lease)
        if work is None or work.outcome is not None:
            return
        if work.phase is Phase.ABORTING:
            self.ended(self._voice.stopped(event.lease))
        else:
            self.ended(self._voice.failed(event.lease, event.error, (event.copy,)))

    def compute_started(self, event: ComputeStarted) -> None:
        """The compute thread took it up."""
        work = self.works.get(event.lease)
        if work is not None and work.phase in _COMPUTING and not work.started:
            work.started = True
            self.report(event.lease.role, self._voice.started(event.lease))

    def stepped(self, event: Stepped) -> None:
        """Report progress, but not too often."""
        work = self.works.get(event.lease)
        if work is None or work.phase not in _COMPUTING or work.outcome is not None:
            return
        if event.preview:
            work.preview = event.preview
        if work.progress is None or event.step > work.progress[0]:  # a picture comes later than its step
            work.progress = (event.step, event.steps)
        if event.step >= event.steps or self.now >= work.progress_at + PROGRESS_INTERVAL:
            self.report_progress(work)
        else:
            work.due = work.progress_at + PROGRESS_INTERVAL

    def checkpoint_made(self, event: CheckpointMade) -> None:
        """Report a checkpoint of a lease that still runs; any other is of no use."""
        work = self.works.get(event.lease)
        if work is None or work.phase is not Phase.COMPUTING:
            self.out.append(ReleaseCopies(copies=(event.manifest.copy,)))
            return
        self.shelf.add_spare(event.manifest, event.lease.role)
        self.report(event.lease.role, self._voice.checkpointed(event))

    def ended(self, outcome: Outcome) -> None:
        """Keep the outcome, and report it until the server has acknowledged it."""
        work = self.works.get(outcome.lease)
        if work is None or work.outcome is not None:
            self.count("repeated_outcome", type(outcome).__name__, outcome.lease)
            if unknown := self.shelf.unknown(outcome):
                self.out.append(ReleaseCopies(copies=unknown))
            return
        self.report_progress(work)
        if work.pull is not None and isinstance(outcome, Staged | Finished):
            outcome = replace(outcome, pull=work.pull)
        work.outcome = outcome
        work.phase = Phase.ENDED
        self.shelf.add(outcome)
        self.report_outcome(work)

    def dropped(self, copies: tuple[CopyId, ...]) -> None:
        """Report copies that fell out of the pool."""
        for role, dropped in self.shelf.drop(copies).items():
            self.report(role, self._voice.dropped(dropped))

    # -- reports ---------------------------------------------------------------------------------------------------

    def report(self, role: Role, message: FromInstance) -> None:
        """Send to the result port of ``role``."""
        self.out.append(Report(role=role, message=message))

    def report_progress(self, work: Work) -> None:
        """Send what was held back."""
        if work.progress is None:
            return
        self.report(work.lease.role, self._voice.progress(work.lease, *work.progress, work.preview))
        work.progress = None
        work.preview = b""
        work.progress_at = self.now
        work.due = Work.NEVER

    def report_outcome(self, work: Work) -> None:
        """Send an outcome, not for the last time unless it is acknowledged."""
        assert work.outcome is not None
        work.due = self.now + work.patience
        work.patience = min(2 * work.patience, LONGEST_RESEND_INTERVAL)
        self.report(work.lease.role, self._voice.outcome(work.outcome))

    def count(self, name: CountName, detail: str, lease: Lease | None = None) -> None:
        """Leave a counter and a log line."""
        request = None if lease is None else lease.request
        self.out.append(Count(name=name, detail=detail, instance=self._hello.instance, request=request))
