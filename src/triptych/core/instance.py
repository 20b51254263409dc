"""The instance machine: keeps a worker's word with the server, through lost messages and server restarts.

Theory of operation. The worker feeds what its threads did and what the server said; the machine returns what to send
and what to start. It holds each lease from the first word of it until the server has acknowledged its end, repeats
outcomes until then, and remembers for a while which leases are over, so that a repeated or overtaken message cannot
start a stage twice. It knows by itself which staged copies exist (it sees every `Staged`, `Release` and drop), so hello
and heartbeat need nothing from the pool. A server that is silent is not asked for anything else than heartbeats: work
goes on, results are kept, and a restarted server answers the next heartbeat with `Unknown`, which leads to a new hello.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from triptych.core.drain import Drain
from triptych.core.events import Tick
from triptych.core.instance_events import (
    CheckpointMade,
    ComputeStarted,
    ConnectResults,
    CopiesDropped,
    CopyKept,
    Ended,
    FromServer,
    Halt,
    InstanceAction,
    InstanceEvent,
    Pulled,
    PullFailed,
    Say,
    Stepped,
    Stop,
    Usage,
)
from triptych.core.leases import Leases
from triptych.core.voice import Voice
from triptych.core.work import Phase, Work
from triptych.ids import Epoch, Role
from triptych.wire.messages import (
    Ack,
    Cancel,
    DrainStatus,
    Hello,
    Keep,
    Lease,
    Refused,
    Release,
    RunStage,
    Unknown,
    Welcome,
)

HELLO_INTERVAL = 1.0
"""Seconds between hellos until one is answered."""
REFUSED_INTERVAL = 5.0
"""Seconds between hellos while the instances that are there keep this one out."""

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
        self._refusal = ""
        self._halted = False
        self._urls: dict[Role, str] = {}
        self._early: list[FromServer] = []
        self._heartbeat_interval = 1.0
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self._usage = Usage(pool_used=0, resident_bytes=0, device_bytes=0)
        self._leases = Leases(hello, self._voice)
        self._drain: Drain | None = None
        self._out: list[InstanceAction] = []
        self._now = 0.0

    # -- what the worker may ask -----------------------------------------------------------------------------------

    @property
    def welcomed(self) -> bool:
        """Whether the server knows this life of the instance."""
        return self._welcomed

    @property
    def refusal(self) -> str:
        """Why the server keeps this life of the instance out for now; empty when it has not said that it does."""
        return self._refusal

    @property
    def server_epoch(self) -> Epoch | None:
        """The server life that welcomed it last: worker messages carry it; the machine corrects it when sending."""
        return self._voice.server

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases whose end the server has not acknowledged."""
        return tuple(self._leases.works)

    def next_deadline(self, now: float) -> float:
        """When the next `Tick` is due at the latest."""
        if self._halted:
            return now + HELLO_INTERVAL
        leave = self._drain.deadline if self._drain is not None else Work.NEVER
        if not self._welcomed:
            return min(self._next_hello, leave)
        return min([self._next_heartbeat, leave, *(work.due for work in self._leases.works.values())])

    def handle(self, event: InstanceEvent, now: float) -> list[InstanceAction]:
        """Apply ``event`` at ``now`` (seconds of any monotonic clock) and return what is to be done, in order."""
        self._now = self._leases.now = now
        self._out = self._leases.out = []
        if self._halted:
            return self._out
        match event:
            case FromServer():
                self._from_server(event)
            case Pulled():
                self._leases.pulled(event)
            case PullFailed():
                self._leases.pull_failed(event)
            case ComputeStarted():
                self._leases.compute_started(event)
            case Stepped():
                self._leases.stepped(event)
            case CheckpointMade():
                self._leases.checkpoint_made(event)
            case CopyKept():
                self._leases.shelf.add_spare(event.manifest, Role.DENOISER)
                self._out.append(Say(message=self._voice.kept(event)))
            case Ended(outcome=outcome):
                self._leases.ended(outcome)
            case CopiesDropped(copies=copies):
                self._leases.dropped(copies)
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
        for work in self._leases.works.values():
            if now >= work.due:
                if work.outcome is not None:
                    self._leases.report_outcome(work)
                else:
                    self._leases.report_progress(work)

    def _say_hello(self) -> None:
        self._next_hello = self._now + HELLO_INTERVAL
        self._out.append(Say(message=self._voice.hello(self._leases.works, self._leases.shelf.manifests())))

    def _say_heartbeat(self) -> None:
        self._next_heartbeat = self._now + self._heartbeat_interval
        copies = self._leases.shelf.listed(self._leases.works)
        self._out.append(Say(message=self._voice.heartbeat(self._leases.works, copies, self._usage)))
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
            case Refused(reason=reason, passing=True):
                # Any of the others may be the wrong one, and go: then this one is needed, with what it holds.
                self._refusal = reason
                self._next_hello = self._now + REFUSED_INTERVAL
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
                    self._leases.work(event)
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
            self._leases.forget_over()  # another server counts attempts anew
        self._voice.server = message.server_epoch
        self._heartbeat_interval = message.heartbeat_interval
        if new_server or message.result_urls != self._urls:
            self._urls = message.result_urls
            self._out.append(ConnectResults(urls=message.result_urls))
        if self._welcomed and not new_server:
            return
        self._welcomed, self._refusal = True, ""
        for work in self._leases.works.values():
            if work.outcome is not None:
                self._leases.report_outcome(work)
            elif work.started:
                self._leases.report(
                    work.lease.role, self._voice.started(work.lease)
                )  # a restarted server has not heard it
        early, self._early = self._early, []
        for event in early:
            if event.message.server_epoch == self._voice.server:
                self._leases.work(event)
            else:
                self._stale(event)
        self._say_heartbeat()

    # -- leaving ---------------------------------------------------------------------------------------------------

    def _stop(self, event: Stop) -> None:
        if self._drain is not None and event.seconds:
            return  # asked once more
        idle = not self._leases.works and not len(self._leases.shelf)
        seconds = 0.0 if idle or not self._welcomed else event.seconds
        self._drain = Drain(self._now, seconds, event.reason, failed=event.failed)
        if not self._take_leave(self._drain):
            self._say_draining(self._drain)

    def _say_draining(self, drain: Drain) -> None:
        self._out.append(Say(message=self._voice.draining(drain.seconds_left(self._now))))

    def _take_leave(self, drain: Drain) -> bool:
        """Leave if it is time; before that, stop what would not be finished, so that another can go on with it."""
        if drain.over(self._now, working=bool(self._leases.works)):
            self._out.append(Say(message=self._voice.goodbye(drain.reason, failed=drain.failed)))
            self._halt(None)
            return True
        if drain.hand_over(self._now):
            for work in self._leases.works.values():
                if work.phase is Phase.COMPUTING:
                    self._leases.suspend(work)
        return False

    def _halt(self, error: str | None) -> None:
        self._halted = True
        self._out.append(Halt(error=error))

    def _stale(self, event: FromServer) -> None:
        message = event.message
        detail = f"{type(message).__name__} of server {message.server_epoch} for life {message.epoch}"
        self._leases.count("stale_message", detail)
