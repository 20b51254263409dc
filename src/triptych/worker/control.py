"""The control thread's loop: the only caller of the instance machine; everything else hears of it by queues.

Each round: wait for messages, posts or a deadline; feed them to the machine as events; carry out its actions.
What belongs to a lease between two threads (pulled inputs, finished files) is kept here and nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, assert_never

from triptych.core.events import Count, Tick
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import (
    Abort,
    ConnectResults,
    CopiesDropped,
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
    Stop,
    Suspend,
    Usage,
)
from triptych.transport.control.instance import InstanceControl
from triptych.transport.data.protocol import DataPlane
from triptych.wire.messages import Finished, FromInstance, Lease
from triptych.worker.crew import Crew
from triptych.worker.failure import stopped
from triptych.worker.jobs import (
    ComputeJob,
    Identity,
    InputsReady,
    KeepJob,
    Loaded,
    MediaReady,
    Post,
    PullJob,
    ThreadDied,
    Ticket,
)
from triptych.worker.lifecycle import EXIT_OPERATOR
from triptych.worker.logs import outcome_line, pull_failed_line
from triptych.worker.metrics import InstanceMetrics
from triptych.worker.standing import Standing
from triptych.worker.threads import Mailbox

log = logging.getLogger(__name__)

_USAGE_SECONDS: Final = 1.0


class ControlLoop:
    """Runs one instance from its first hello to its halt."""

    def __init__(
        self,
        *,
        control: InstanceControl,
        machine: InstanceMachine,
        plane: DataPlane,
        crew: Crew,
        mailbox: Mailbox,
        identity: Identity,
        usage: Callable[[], Usage],
        metrics: InstanceMetrics | None = None,
        standing: Standing,
    ) -> None:
        self._control = control
        self._machine = machine
        self._plane = plane
        self._crew = crew
        self._mailbox = mailbox
        self._identity = identity
        self._usage = usage
        self._metrics = metrics
        self._standing = standing
        self._tickets: dict[Lease, Ticket] = {}
        self._inputs: dict[Lease, InputsReady] = {}
        """Pulled and not yet given to the compute thread."""
        self._pulled: dict[Lease, Pulled] = {}
        self._files: dict[Lease, tuple[bytes, ...]] = {}
        """Kept to be sent again until the server has stored them."""
        self._events: deque[InstanceEvent] = deque()
        self._exit_code: int | None = None

    def run(self) -> int:
        """Serve until the machine halts; the exit code of the process: 0 when it was asked to stop."""
        next_usage = time.monotonic()
        while self._exit_code is None:
            now = time.monotonic()
            if now >= next_usage:
                next_usage = now + _USAGE_SECONDS
                self._feed(self._usage())
                if self._metrics is not None:
                    self._metrics.held(len(self._machine.leases))
                    self._metrics.dropped(self._control.dropped)
                self._standing.saw(self._machine.welcomed, now, self._machine.refusal)
                self._audit()
            self._feed(Tick())
            self._control.flush()
            if self._exit_code is not None:
                break
            now = time.monotonic()
            delay = min(self._machine.next_deadline(now), next_usage) - now
            for message, blobs in self._control.poll(max(0.0, delay)):
                self._feed(FromServer(message=message, blobs=blobs))
            # Asked before the posts are taken and told after them: what is dropped has been announced before.
            dropped = self._plane.take_dropped()
            for post in self._mailbox.take():
                self._receive(post)
            if dropped:
                self._feed(CopiesDropped(copies=dropped))
        return self._exit_code

    def _audit(self) -> None:
        """Look through the pool's books while nothing is computed; an instance whose books are wrong starts anew."""
        if self._machine.leases:
            return
        try:
            self._plane.check_integrity()
        except AssertionError as error:
            log.critical("the books of the transfer pool are wrong: %s", error)
            self._feed(Stop(reason=f"the books of the transfer pool are wrong: {error}", failed=True))
            self._exit_code = 1

    def abandon(self) -> None:
        """Set the flag of every lease, so that all threads let go of what they do."""
        for ticket in self._tickets.values():
            ticket.cancelled.set()

    # -- what comes in ------------------------------------------------------------------------------------------

    def _receive(self, post: Post) -> None:
        match post:
            case InputsReady():
                self._inputs_ready(post)
            case MediaReady():
                self._files[post.outcome.lease] = post.files
                self._feed(Ended(outcome=post.outcome))
            case ThreadDied():
                self._feed(Stop(reason=f"the {post.thread} thread died: {post.reason}", failed=True))
                self._exit_code = 1
            case Loaded():
                raise AssertionError("a model is loaded once, before the loop runs")
            case _:
                self._feed(post)

    def _inputs_ready(self, post: InputsReady) -> None:
        lease = post.ticket.lease
        if post.ticket.cancelled.is_set():
            self._feed(Ended(outcome=stopped(self._identity, lease)))
            return
        self._inputs[lease] = post
        self._pulled[lease] = post.pulled
        self._feed(post.pulled)

    def _feed(self, event: InstanceEvent) -> None:
        """Hand ``event`` to the machine and do what it says; events that come of that follow after it."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # called from an action: the loop below takes it up
        while self._events:
            event = self._events[0]
            if self._metrics is not None:
                self._metrics.saw(event)
            if isinstance(event, Ended):
                lease = event.outcome.lease
                log.info("%s", outcome_line(event.outcome, self._pulled.get(lease)))
                self._let_go(lease)
            elif isinstance(event, PullFailed):
                log.warning("%s", pull_failed_line(event))
                self._let_go(event.lease)
            for action in self._machine.handle(event, time.monotonic()):
                self._do(action)
            self._events.popleft()

    def _let_go(self, lease: Lease) -> None:
        self._tickets.pop(lease, None)
        self._inputs.pop(lease, None)
        self._pulled.pop(lease, None)

    # -- what goes out ------------------------------------------------------------------------------------------

    def _do(self, action: InstanceAction) -> None:
        match action:
            case Say():
                self._control.say(action.message)
            case Report():
                self._control.report(action.role, action.message, self._blobs(action.message))
            case ConnectResults():
                self._control.connect_results(action.urls)
            case StartPull():
                ticket = self._ticket(action.lease)
                self._crew.pull(PullJob(ticket=ticket, inputs=action.inputs, resume=action.resume))
            case StartCompute():
                self._start(action)
            case Abort():
                self._abort(action.lease)
            case Suspend():
                if (ticket := self._tickets.get(action.lease)) is not None:
                    ticket.suspended.set()
            case KeepCopy():
                self._crew.keep(KeepJob(manifest=action.manifest, spare=action.spare))
            case ReleaseCopies():
                self._plane.release(action.copies)
                self._crew.released(action.copies)
            case Forget():
                self._files.pop(action.lease, None)
            case Halt():
                self._halt(action)
            case Count():
                log.warning("%s: %s", action.name, action.detail)
                if self._metrics is not None:
                    self._metrics.counted(action.name)
            case _:
                assert_never(action)

    def _blobs(self, message: FromInstance) -> tuple[bytes, ...]:
        return self._files[message.lease] if isinstance(message, Finished) else ()

    def _ticket(self, lease: Lease) -> Ticket:
        return self._tickets.setdefault(lease, Ticket(lease))

    def _start(self, action: StartCompute) -> None:
        ready = self._inputs.pop(action.lease, None)
        self._crew.compute(
            ComputeJob(
                ticket=self._ticket(action.lease),
                params=action.params,
                inputs=() if ready is None else ready.inputs,
                images=action.blobs,
                resume=None if ready is None else ready.resume,
            )
        )

    def _abort(self, lease: Lease) -> None:
        ticket = self._tickets.get(lease)
        if ticket is not None:
            ticket.cancelled.set()
        if ticket is None or lease in self._inputs:  # with no thread: nobody else will answer for it
            self._feed(Ended(outcome=stopped(self._identity, lease)))

    def _halt(self, action: Halt) -> None:
        if action.error is not None:
            log.critical("%s", action.error)
        if self._exit_code is None:
            # One that has served was launched well: what it met may pass, and whoever supervises it starts it again.
            failed = EXIT_OPERATOR if self._machine.server_epoch is None else 1
            self._exit_code = 0 if action.error is None else failed
