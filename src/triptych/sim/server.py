"""A modelled server: the real router over a shell that keeps a journal, stores files and can be restarted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from triptych.config import RouterConfig
from triptych.core.events import (
    CancelRequest,
    Clocks,
    Connect,
    Count,
    Disconnect,
    FilesStored,
    InstanceExited,
    JobState,
    JobView,
    LeaseGranted,
    MigrateRequest,
    Note,
    PauseRequest,
    Received,
    ResumeRequest,
    RouterEvent,
    SendMember,
    SendWork,
    StageDone,
    StoreFailed,
    StoreFiles,
    Submit,
    Tick,
    Update,
)
from triptych.core.instance_events import FromServer
from triptych.core.journal import Accepted, Deleting, FileNote, Finish, History, Paused, Stored, request_of
from triptych.core.router import Router
from triptych.core.states import TERMINAL, TRANSITIONS
from triptych.ids import ROLES, Epoch, InstanceId, RequestId
from triptych.sim.coverage import Fault
from triptych.sim.instance import SimInstance
from triptych.sim.network import SERVER, Message, Network
from triptych.sim.world import Clock, World
from triptych.wire.messages import ErrorInfo

_FILE = FileNote(name="f.mp4", mime="video/mp4", suffix=".mp4", nbytes=4, width=8, height=8, frames=1, fps=8.0)


class SimServer:
    """One server over all its lives."""

    def __init__(self, world: World, network: Network, instances: dict[InstanceId, SimInstance]) -> None:
        self._world = world
        self._network = network
        self._instances = instances
        self._lives = 0
        self._states: dict[RequestId, JobState] = {}
        """What this life has last shown of each request."""
        self._unheard: list[Message] = []
        """What arrived while there was no server, and waits at the door."""
        self._wishes: list[Callable[[], object]] = []
        self.alive = False
        self.clock = Clock(world)
        self.journal: dict[RequestId, History] = {}
        """What is on the disk of every accepted request that is not deleted."""
        self.ended: dict[RequestId, JobView] = {}
        """How requests ended, as clients were told or will find."""
        self.deleted: set[RequestId] = set()
        """Whose clients were told that they are gone."""
        self.history: dict[RequestId, list[JobView]] = {}
        self.start()

    def start(self) -> None:
        """Begin a new life that knows the journal only; a life that has not ended ends before."""
        self._lives += 1
        self.alive = True
        self.clock.reset()
        self.epoch = Epoch(f"server/{self._lives}")
        self._world.note(SERVER, f"start {self.epoch}")
        config = RouterConfig(dispatch_policy=self._world.plan.policy, max_kills=self._world.plan.max_kills)
        self.router = Router(config, self.epoch, {role: f"tcp://server/{role}" for role in ROLES})
        self._timer = float("inf")
        self._states = {}
        for history in tuple(self.journal.values()):
            self._recall(history)
        unheard, self._unheard = self._unheard, []
        for message in unheard:
            self._world.after(self._world.plan.latency, partial(self.receive, message))
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            wish()

    @property
    def live(self) -> set[RequestId]:
        """Accepted requests of which no end is known."""
        return self.journal.keys() - self.ended.keys()

    def _recall(self, history: History) -> None:
        """Take up one request of an earlier life. Raises `Violation` when a client was told otherwise for good."""
        faults, request = self._world.coverage.faults, history.accepted.request
        told = self.ended.get(request)
        if history.live:
            if told is not None:
                if told.state not in (JobState.FAILED, JobState.TIMED_OUT):
                    raise self._world.violation(f"{request} was told to be {told.state} and runs again")
                faults[Fault.END_LOST] += 1
                del self.ended[request]
            self._feed(history.restore())
            if history.paused:
                faults[Fault.KILLED_PAUSED] += 1
                self._feed(PauseRequest(request=request))
            return
        found = history.ended().view
        if told is not None and told.state in (JobState.DONE, JobState.CANCELLED) and told.state is not found.state:
            raise self._world.violation(f"{request} was told to be {told.state} and is {found.state} now")
        if told is None:
            faults[Fault.KILLED_STORING] += history.stored is not None
            self._world.coverage.ends[found.state] += 1
        self.ended[request] = found
        if history.deleting:
            faults[Fault.KILLED_DELETING] += 1
            del self.journal[request]

    def crash(self, *, back_in: float) -> None:
        """End this life without a word; the next one begins ``back_in`` seconds later."""
        if not self.alive:
            return
        self._world.strike(Fault.SERVER_CRASH, SERVER)
        self.alive = False
        self._world.after(back_in, self._restart)

    def _die_midway(self) -> None:
        if self._world.chance(self._world.plan.killed_midway):
            self.crash(back_in=self._world.random.random() * self._world.plan.server_downtime)

    def _restart(self) -> None:
        if not self.alive:
            self._world.coverage.faults[Fault.SERVER_RESTART] += 1
            self.start()

    def ask(self, action: Callable[[], object]) -> None:
        """A client's wish, which it repeats until there is a server."""
        if self.alive:
            action()
        else:
            self._wishes.append(action)

    def submit(self, event: Submit) -> None:
        """A client's request: journalled, then routed."""
        accepted = Accepted(
            request=event.request,
            output="video",
            params=event.params,
            metadata={},
            queue_timeout=event.queue_timeout,
            run_timeout=event.run_timeout,
            created_at=self._world.now,
        )
        self.journal[event.request] = History(accepted)
        self._states[event.request] = JobState.PENDING
        self._feed(event)

    def receive(self, message: Message) -> None:
        """A message has reached the process, or the place where it was."""
        assert isinstance(message, Received)
        if self.alive:
            self._feed(message)
        elif self._world.random.random() < 0.5:
            self._unheard.append(message)
        else:
            self._world.strike(Fault.MESSAGE_LOST, SERVER, message)

    def feed(self, event: RouterEvent) -> None:
        """Something the shell knows by itself, or a client's wish."""
        match event:
            case CancelRequest():
                self._world.coverage.faults[Fault.CANCEL] += 1
            case PauseRequest():
                self._world.coverage.faults[Fault.PAUSE] += 1
            case MigrateRequest():
                self._world.coverage.faults[Fault.MIGRATE] += 1
            case _:
                pass
        self._feed(event)
        if isinstance(event, PauseRequest | ResumeRequest) and event.request in self.live:
            self._write(Paused(request=event.request, paused=isinstance(event, PauseRequest)))

    def delete(self, request: RequestId) -> None:
        """A client's wish: stop a request if it runs, and forget it; on the disk before the client hears of it."""
        if (history := self.journal.get(request)) is None:
            return
        self._world.strike(Fault.DELETE, SERVER, request)
        self._feed(CancelRequest(request=request))
        history.add(Deleting(request=request))
        self.deleted.add(request)
        epoch = self.epoch

        def forget() -> None:
            if self.alive and epoch == self.epoch:
                self.journal.pop(request, None)

        self._world.after(self._world.around(0.02), forget)
        self._die_midway()

    def refused(self, instance: InstanceId) -> None:
        """The shell finds nobody at an instance's work port, whether that is so or not."""
        if self.alive and any(view.instance == instance for view in self.router.instances()):
            self._world.strike(Fault.REFUSED, SERVER, instance)
            self._feed(InstanceExited(instance=instance))

    def jump(self, seconds: float) -> None:
        """The clock goes ahead."""
        self._world.strike(Fault.CLOCK_JUMP, SERVER, seconds)
        self.clock.jump(seconds)

    def _feed(self, event: RouterEvent) -> None:
        world, now = self._world, self.clock.now
        if not isinstance(event, Tick):
            world.note(SERVER, event)
        for action in self.router.handle(event, now):
            match action:
                case SendMember(instance=instance, message=message) | SendWork(instance=instance, message=message):
                    self._network.send(SERVER, instance, FromServer(message=message), self._instances[instance].arrive)
                case StoreFiles():
                    self._store(action)
                case Update(view=view):
                    self._show(view)
                case Count(name=name):
                    world.coverage.counted[name] += 1
                case LeaseGranted() | StageDone() | Clocks():
                    self._write(action)
                case Connect() | Disconnect():
                    pass
                case _:
                    assert_never(action)
        self._check_books()
        deadline = self.router.next_deadline(now)
        if deadline < self._timer:
            self._timer = deadline
            world.after(max(1e-6, deadline - now), partial(self._ring, self.epoch, deadline))

    def _check_books(self) -> None:
        try:
            self.router.check_integrity()
        except AssertionError as error:
            raise self._world.violation(f"the books do not add up: {error}") from error

    def _ring(self, epoch: Epoch, when: float) -> None:
        if self.alive and epoch == self.epoch and when == self._timer:
            self._timer = float("inf")
            self._feed(Tick())

    def _show(self, view: JobView) -> None:
        if view.request in self.ended:
            raise self._world.violation(f"{view.request} goes on after its end: {view}")
        self.history.setdefault(view.request, []).append(view)
        coverage, old = self._world.coverage, self._states.get(view.request)
        self._states[view.request] = view.state
        if old is not None and old is not view.state:
            if view.state not in TRANSITIONS[old]:
                raise self._world.violation(f"{view.request} went from {old} to {view.state}")
            coverage.transitions[old, view.state] += 1
        if view.state in TERMINAL:
            coverage.ends[view.state] += 1
            self.ended[view.request] = view
            end = Finish(view=view, started_at=None, completed_at=self._world.now)
            if view.state is JobState.CANCELLED:  # the client hears of it once it is on the disk
                self.journal[view.request].add(end)
            else:
                self._write(end)

    def _write(self, entry: Note | Paused | Finish) -> None:
        if self._world.chance(self._world.plan.unjournalled):  # what a killed server had no time to write
            self._world.coverage.faults[Fault.UNJOURNALLED] += 1
        else:
            self.journal[request_of(entry)].add(entry)

    def _store(self, action: StoreFiles) -> None:
        world, lease, epoch = self._world, action.lease, self.epoch
        failed = world.chance(world.plan.store_failure)

        def stored() -> None:
            if not self.alive or epoch != self.epoch:
                return
            if failed:
                world.coverage.faults[Fault.STORE_FAILED] += 1
                error = ErrorInfo(code="storage_full", message="simulated", blame="operator", retryable=True)
                self._feed(StoreFailed(request=lease.request, attempt=lease.attempt, error=error))
                return
            if lease.request in self.live:
                self.journal[lease.request].add(Stored(request=lease.request, files=(_FILE,), stored_at=world.now))
            world.after(world.around(0.01), say)
            self._die_midway()

        def say() -> None:
            if self.alive and epoch == self.epoch:
                self._feed(FilesStored(request=lease.request, attempt=lease.attempt))

        world.after(world.around(0.02), stored)
