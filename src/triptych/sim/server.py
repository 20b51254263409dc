"""A modelled server: the real router over a shell that keeps a journal, stores files and can be restarted."""

from __future__ import annotations

from typing import assert_never

from triptych.config import RouterConfig
from triptych.core.events import (
    Count,
    Disconnect,
    FilesStored,
    JobView,
    LeaseGranted,
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
from triptych.core.journal import Accepted, History
from triptych.core.router import Router
from triptych.core.states import TERMINAL
from triptych.ids import ROLES, Epoch, InstanceId, RequestId
from triptych.sim.worker import SimInstance
from triptych.sim.world import Message, World
from triptych.wire.messages import ErrorInfo


class SimServer:
    """One server over all its lives."""

    def __init__(self, world: World, instances: dict[InstanceId, SimInstance]) -> None:
        self._world = world
        self._instances = instances
        self._lives = 0
        self.journal: dict[RequestId, History] = {}
        """Accepted and not ended."""
        self.ended: dict[RequestId, JobView] = {}
        self.history: dict[RequestId, list[JobView]] = {}
        self.counts: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """Begin a new life that knows the journal only."""
        self._lives += 1
        self.epoch = Epoch(f"server/{self._lives}")
        self._world.note("server", f"start {self.epoch}")
        config = RouterConfig(dispatch_policy=self._world.plan.policy)
        self.router = Router(config, self.epoch, {role: f"tcp://server/{role}" for role in ROLES})
        self._timer = float("inf")
        for history in tuple(self.journal.values()):
            self._feed(history.restore())

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
        self._feed(event)

    def receive(self, message: Message) -> None:
        """A message has reached the process."""
        assert isinstance(message, Received)
        self._feed(message)

    def feed(self, event: RouterEvent) -> None:
        """Something the shell knows by itself."""
        self._feed(event)

    def _feed(self, event: RouterEvent) -> None:
        world = self._world
        if not isinstance(event, Tick):
            world.note("server", event)
        for action in self.router.handle(event, world.now):
            match action:
                case SendMember(instance=instance, message=message) | SendWork(instance=instance, message=message):
                    world.send(FromServer(message=message), self._instances[instance].arrive)
                case StoreFiles():
                    self._store(action)
                case Update(view=view):
                    self._show(view)
                case Count(name=name):
                    self.counts[name] = self.counts.get(name, 0) + 1
                case LeaseGranted() | StageDone():
                    self._write(action)
                case Disconnect():
                    pass
                case _:
                    assert_never(action)
        try:
            self.router.check_integrity()
        except AssertionError as error:
            raise world.violation(f"the books do not add up: {error}") from error
        deadline = self.router.next_deadline(world.now)
        if deadline < self._timer or self._timer <= world.now:
            self._timer = deadline
            epoch = self.epoch
            world.at(deadline, lambda: self._ring(epoch, deadline))

    def _ring(self, epoch: Epoch, when: float) -> None:
        if epoch == self.epoch and when == self._timer:
            self._feed(Tick())

    def _show(self, view: JobView) -> None:
        if view.request in self.ended:
            raise self._world.violation(f"{view.request} goes on after its end: {view}")
        self.history.setdefault(view.request, []).append(view)
        if view.state in TERMINAL:
            self.ended[view.request] = view
            del self.journal[view.request]

    def _write(self, entry: LeaseGranted | StageDone) -> None:
        if not self._world.chance(self._world.plan.unjournalled):  # what a killed server had no time to write
            self.journal[entry.lease.request].add(entry)

    def _store(self, action: StoreFiles) -> None:
        world, lease, epoch = self._world, action.lease, self.epoch
        failed = world.chance(world.plan.store_failure)

        def stored() -> None:
            if epoch != self.epoch:
                return
            if failed:
                error = ErrorInfo(code="disk_full", message="simulated", blame="operator")
                self._feed(StoreFailed(request=lease.request, attempt=lease.attempt, error=error))
            else:
                self._feed(FilesStored(request=lease.request, attempt=lease.attempt))

        world.after(world.around(0.02), stored)
