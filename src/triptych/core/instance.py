"""The instance machine: keeps a worker's word with the server, through lost messages and server restarts.

Theory of operation. The worker feeds what its threads did and what the server said; the machine returns what to send
and what to start. It holds each lease from the first word of it until the server has acknowledged its end, repeats
outcomes until then, and remembers for a while which leases are over, so that a repeated or overtaken message cannot
start a stage twice. It knows by itself which staged copies exist (it sees every `Staged`, `Release` and drop), so hello
and heartbeat need nothing from the pool. A server that is silent is not asked for anything else than heartbeats: work
goes on, results are kept, and a restarted server answers the next heartbeat with `Unknown`, which leads to a new hello.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import assert_never

from triptych.core.drain import Drain
from triptych.core.events import (
    Abort,
    CheckpointMade,
    ComputeStarted,
    ConnectResults,
    CopiesDropped,
    CopyKept,
    Count,
    Ended,
    Forget,
    FromServer,
    Halt,
    InstanceAction,
    InstanceEvent,
    KeepCopy,
    Pulled,
    PullFailed,
    ReleaseCopies,
    Report,
    Say,
    StartCompute,
    StartPull,
    Stepped,
    Stop,
    Suspend,
    Tick,
    Usage,
)
from triptych.core.shelf import Shelf
from triptych.core.voice import Voice
from triptych.core.work import PROGRESS_INTERVAL, RESEND_INTERVAL, Phase, Work
from triptych.ids import CopyId, Epoch, Role
from triptych.wire.messages import (
    Ack,
    Cancel,
    DrainStatus,
    ErrorInfo,
    FromInstance,
    Hello,
    Keep,
    Lease,
    Outcome,
    Refused,
    Release,
    RunStage,
    Unknown,
    Welcome,
)

HELLO_INTERVAL = 1.0
"""Seconds between hellos until one is answered."""

_REMEMBERED = 1024
"""Leases that are remembered as over."""

_COMPUTING = (Phase.COMPUTING, Phase.SUSPENDING)

_EARLY = 256
"""Messages kept from a server whose welcome has not arrived: work and welcome come by different ways."""


class InstanceMachine:
    """The server's picture of one life of an instance, kept true.

    ``hello`` says what the instance is: its id, epoch, roles, addresses, slots, pool, schema. Its ``server_epoch``,
    ``leases`` and ``copies`` are filled in by the machine.
    """

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._voice = Voice(hello)
        self._past_servers: deque[Epoch] = deque(maxlen=16)
        self._welcomed = False
        self._halted = False
        self._urls: dict[Role, str] = {}
        self._early: list[FromServer] = []
        self._heartbeat_interval = 1.0
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self._usage = Usage(pool_used=0, resident_bytes=0, device_bytes=0)
        self._works: dict[Lease, Work] = {}
        self._over: OrderedDict[Lease, None] = OrderedDict()
        self._shelf = Shelf()
        self._drain: Drain | None = None
        self._out: list[InstanceAction] = []
        self._now = 0.0

    # -- what the worker may ask -----------------------------------------------------------------------------------

    @property
    def welcomed(self) -> bool:
        """Whether the server knows this life of the instance."""
        return self._welcomed

    @property
    def server_epoch(self) -> Epoch | None:
        """The server life that welcomed it last: worker messages carry it; the machine corrects it when sending."""
        return self._voice.server

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases whose end the server has not acknowledged."""
        return tuple(self._works)

    def next_deadline(self, now: float) -> float:
        """When the next `Tick` is due at the latest."""
        if self._halted:
            return now + HELLO_INTERVAL
        leave = self._drain.deadline if self._drain is not None else Work.NEVER
        if not self._welcomed:
            return min(self._next_hello, leave)
        return min([self._next_heartbeat, leave, *(work.due for work in self._works.values())])

    def handle(self, event: InstanceEvent, now: float) -> list[InstanceAction]:
        """Apply ``event`` at ``now`` (seconds of any monotonic clock) and return what is to be done, in order."""
        self._now = now
        self._out = []
        if self._halted:
            return self._out
        match event:
            case FromServer():
                self._from_server(event)
            case Pulled():
                self._pulled(event)
            case PullFailed():
                self._pull_failed(event)
            case ComputeStarted():
                self._compute_started(event)
            case Stepped():
                self._stepped(event)
            case CheckpointMade():
                self._checkpoint_made(event)
            case CopyKept():
                self._shelf.add_spare(event.manifest, Role.DENOISER)
                self._out.append(Say(message=self._voice.kept(event)))
            case Ended(outcome=outcome):
                self._ended(outcome)
            case CopiesDropped(copies=copies):
                self._dropped(copies)
            case Usage():
                self._usage = event
            case Stop():
                self._stop(event)
            case Tick():
                self._tick()
            case _:
                assert_never(event)
        return self._out

    # -- membership ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._now
        if self._drain is not None and self._take_leave(self._drain):
            return
        if not self._welcomed:
            if now >= self._next_hello:
                self._say_hello()
            return
        if now >= self._next_heartbeat:
            self._say_heartbeat()
        for work in self._works.values():
            if now >= work.due:
                if work.outcome is not None:
                    self._report_outcome(work)
                else:
                    self._report_progress(work)

    def _say_hello(self) -> None:
        self._next_hello = self._now + HELLO_INTERVAL
        self._out.append(Say(message=self._voice.hello(self._works, self._shelf.manifests())))

    def _say_heartbeat(self) -> None:
        self._next_heartbeat = self._now + self._heartbeat_interval
        copies = self._shelf.listed(self._works)
        self._out.append(Say(message=self._voice.heartbeat(self._works, copies, self._usage)))
        if self._drain is not None:
            self._say_draining(self._drain)

    def _from_server(self, event: FromServer) -> None:
        message = event.message
        if message.epoch != self._hello.epoch:
            self._stale(event)
            return
        match message:
            case Welcome():
                # Nothing tells which of two server lives is the later one. So a welcome is believed when one is due,
                # and whoever does not know this instance is told: a wrong belief ends with the next heartbeat.
                if self._welcomed and message.server_epoch != self._voice.server:
                    self._stale(event)
                else:
                    self._welcome(message)
            case Refused() if self._welcomed:
                self._stale(event)
            case Refused(reason=reason):
                self._halt(f"the server refused this instance: {reason}")
            case Unknown():
                # An answer to an earlier heartbeat may arrive after the hello that it asks for.
                if self._welcomed or self._now >= self._next_hello:
                    self._welcomed = False
                    self._say_hello()
            case DrainStatus(needed=needed):
                if self._drain is not None and message.server_epoch == self._voice.server:
                    self._drain.answer(self._now, needed=needed)
                    self._take_leave(self._drain)
            case RunStage() | Cancel() | Keep() | Release() | Ack():
                if message.server_epoch == self._voice.server:
                    self._work(event)
                elif message.server_epoch not in self._past_servers and len(self._early) < _EARLY:
                    self._early.append(event)
                else:
                    self._stale(event)
            case _:
                assert_never(message)

    def _welcome(self, message: Welcome) -> None:
        new_server = message.server_epoch != self._voice.server
        if new_server:
            if self._voice.server is not None:
                self._past_servers.append(self._voice.server)
            if message.server_epoch in self._past_servers:
                self._past_servers.remove(message.server_epoch)
            self._over.clear()  # another server counts attempts anew
        self._voice.server = message.server_epoch
        self._heartbeat_interval = message.heartbeat_interval
        if new_server or message.result_urls != self._urls:
            self._urls = message.result_urls
            self._out.append(ConnectResults(urls=message.result_urls))
        if self._welcomed and not new_server:
            return
        self._welcomed = True
        for work in self._works.values():
            if work.outcome is not None:
                self._report_outcome(work)
            elif work.started:
                self._report(work.lease.role, self._voice.started(work.lease))  # a restarted server has not heard it
        early, self._early = self._early, []
        for event in early:
            if event.message.server_epoch == self._voice.server:
                self._work(event)
            else:
                self._stale(event)
        self._say_heartbeat()

    # -- leaving ---------------------------------------------------------------------------------------------------

    def _stop(self, event: Stop) -> None:
        if self._drain is not None and event.seconds:
            return  # asked once more
        idle = not self._works and not len(self._shelf)
        self._drain = Drain(self._now, 0.0 if idle or not self._welcomed else event.seconds, event.reason)
        if not self._take_leave(self._drain):
            self._say_draining(self._drain)

    def _say_draining(self, drain: Drain) -> None:
        self._out.append(Say(message=self._voice.draining(drain.seconds_left(self._now))))

    def _take_leave(self, drain: Drain) -> bool:
        """Leave if it is time; before that, stop what would not be finished, so that another can go on with it."""
        if drain.over(self._now, working=bool(self._works)):
            self._out.append(Say(message=self._voice.goodbye(drain.reason)))
            self._halt(None)
            return True
        if drain.hand_over(self._now):
            for work in self._works.values():
                if work.phase is Phase.COMPUTING:
                    self._suspend(work)
        return False

    def _halt(self, error: str | None) -> None:
        self._halted = True
        self._out.append(Halt(error=error))

    def _stale(self, event: FromServer) -> None:
        message = event.message
        detail = f"{type(message).__name__} of server {message.server_epoch} for life {message.epoch}"
        self._count("stale_message", detail)

    # -- work from the server --------------------------------------------------------------------------------------

    def _work(self, event: FromServer) -> None:
        match event.message:
            case RunStage() as message:
                self._run(message, event.blobs)
            case Cancel(lease=lease, keep=keep):
                self._cancel(lease, keep=keep)
            case Keep(manifest=manifest, spare=spare):
                self._out.append(KeepCopy(manifest=manifest, spare=spare))
            case Release(copies=copies):
                self._shelf.remove(copies)
                self._out.append(ReleaseCopies(copies=copies))
            case Ack(leases=leases):
                self._acknowledged(leases)
            case Welcome() | Refused() | Unknown() | DrainStatus():
                raise AssertionError("membership is not work")
            case _:
                assert_never(event.message)

    def _run(self, message: RunStage, blobs: tuple[bytes, ...]) -> None:
        lease = message.lease
        if lease in self._works or lease in self._over:
            self._count("repeated_lease", f"{lease.role} attempt {lease.attempt}", lease)
            return
        active = sum(work.outcome is None for work in self._works.values())
        if active >= self._hello.slots:
            self._count("slots_exceeded", f"{active} leases in {self._hello.slots} slots", lease)
        work = Work(lease=lease, params=message.params, blobs=blobs, budget_seconds=message.budget_seconds)
        self._works[lease] = work
        if lease.role not in self._hello.roles:
            roles = ", ".join(self._hello.roles)
            reason = f"role={lease.role}: this instance serves {roles}"
            error = ErrorInfo(code="wrong_role", message=reason, blame="us", retryable=True)
            self._ended(self._voice.failed(lease, error))
        elif message.inputs:
            self._out.append(StartPull(lease=lease, inputs=message.inputs, resume=message.resume))
        else:
            self._compute(work)

    def _compute(self, work: Work) -> None:
        work.phase = Phase.COMPUTING
        self._out.append(
            StartCompute(lease=work.lease, params=work.params, blobs=work.blobs, budget_seconds=work.budget_seconds)
        )
        work.blobs = ()

    def _cancel(self, lease: Lease, *, keep: bool) -> None:
        work = self._works.get(lease)
        if work is None:
            # Remembered, so that a lease which this cancel has overtaken is not begun.
            self._remember(lease)
            self._report(lease.role, self._voice.stopped(lease))
        elif work.outcome is not None:
            self._report_outcome(work)
        elif keep and work.phase is not Phase.PULLING:
            if work.phase is Phase.COMPUTING:
                self._suspend(work)
        elif work.phase is not Phase.ABORTING:
            work.phase = Phase.ABORTING
            self._out.append(Abort(lease=lease))

    def _suspend(self, work: Work) -> None:
        work.phase = Phase.SUSPENDING
        self._out.append(Suspend(lease=work.lease))

    def _acknowledged(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            if (work := self._works.get(lease)) is not None and work.outcome is not None:
                del self._works[lease]
                self._remember(lease)
                self._out.append(Forget(lease=lease))

    def _remember(self, lease: Lease) -> None:
        self._over[lease] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    # -- word from the worker's threads ----------------------------------------------------------------------------

    def _pulled(self, event: Pulled) -> None:
        work = self._works.get(event.lease)
        if work is None or work.phase is not Phase.PULLING:
            return  # aborted meanwhile: the worker answers the abort
        self._report(event.lease.role, self._voice.fetched(event))
        self._compute(work)

    def _pull_failed(self, event: PullFailed) -> None:
        work = self._works.get(event.lease)
        if work is None or work.outcome is not None:
            return
        if work.phase is Phase.ABORTING:
            self._ended(self._voice.stopped(event.lease))
        else:
            self._ended(self._voice.failed(event.lease, event.error, (event.copy,)))

    def _compute_started(self, event: ComputeStarted) -> None:
        work = self._works.get(event.lease)
        if work is not None and work.phase in _COMPUTING and not work.started:
            work.started = True
            self._report(event.lease.role, self._voice.started(event.lease))

    def _stepped(self, event: Stepped) -> None:
        work = self._works.get(event.lease)
        if work is None or work.phase not in _COMPUTING or work.outcome is not None:
            return
        work.progress = (event.step, event.steps)
        if event.step >= event.steps or self._now >= work.progress_at + PROGRESS_INTERVAL:
            self._report_progress(work)
        else:
            work.due = work.progress_at + PROGRESS_INTERVAL

    def _checkpoint_made(self, event: CheckpointMade) -> None:
        work = self._works.get(event.lease)
        if work is None or work.phase is not Phase.COMPUTING:
            self._out.append(ReleaseCopies(copies=(event.manifest.copy,)))
            return
        self._shelf.add_spare(event.manifest, event.lease.role)
        self._report(event.lease.role, self._voice.checkpointed(event))

    def _ended(self, outcome: Outcome) -> None:
        work = self._works.get(outcome.lease)
        if work is None or work.outcome is not None:
            self._count("repeated_outcome", type(outcome).__name__, outcome.lease)
            if unknown := self._shelf.unknown(outcome):
                self._out.append(ReleaseCopies(copies=unknown))
            return
        self._report_progress(work)
        work.outcome = outcome
        work.phase = Phase.ENDED
        self._shelf.add(outcome)
        self._report_outcome(work)

    def _dropped(self, copies: tuple[CopyId, ...]) -> None:
        for role, dropped in self._shelf.drop(copies).items():
            self._report(role, self._voice.dropped(dropped))

    # -- reports ---------------------------------------------------------------------------------------------------

    def _report(self, role: Role, message: FromInstance) -> None:
        self._out.append(Report(role=role, message=message))

    def _report_progress(self, work: Work) -> None:
        if work.progress is None:
            return
        self._report(work.lease.role, self._voice.progress(work.lease, *work.progress))
        work.progress = None
        work.progress_at = self._now
        work.due = Work.NEVER

    def _report_outcome(self, work: Work) -> None:
        assert work.outcome is not None
        work.due = self._now + RESEND_INTERVAL
        self._report(work.lease.role, self._voice.outcome(work.outcome))

    def _count(self, name: str, detail: str, lease: Lease | None = None) -> None:
        request = None if lease is None else lease.request
        self._out.append(Count(name=name, detail=detail, instance=self._hello.instance, request=request))
