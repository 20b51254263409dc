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
from triptych.core.journal import Accepted, History, request_of
from triptych.core.router import Router
from triptych.core.states import TERMINAL
from triptych.ids import ROLES, Epoch, InstanceId, RequestId
from triptych.sim.coverage import Fault
from triptych.sim.network import SERVER, Message, Network
from triptych.sim.worker import SimInstance
from triptych.sim.world import Clock, World
from triptych.wire.messages import ErrorInfo


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
        """Accepted and not ended."""
        self.ended: dict[RequestId, JobView] = {}
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
            self._feed(history.restore())
        unheard, self._unheard = self._unheard, []
        for message in unheard:
            self._world.after(self._world.plan.latency, partial(self.receive, message))
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            wish()

    def crash(self, *, back_in: float) -> None:
        """End this life without a word; the next one begins ``back_in`` seconds later."""
        if not self.alive:
            return
        self._world.strike(Fault.SERVER_CRASH, SERVER)
        self.alive = False
        self._world.after(back_in, self._restart)

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
            coverage.transitions[old, view.state] += 1
        if view.state in TERMINAL:
            coverage.ends[view.state] += 1
            self.ended[view.request] = view
            del self.journal[view.request]

    def _write(self, entry: Note) -> None:
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
            else:
                self._feed(FilesStored(request=lease.request, attempt=lease.attempt))

        world.after(world.around(0.02), stored)
