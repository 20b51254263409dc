"""A modelled instance over all its lives: the real instance machine, each life of it over a modelled worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from triptych.core.events import Count, Received, Tick
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import (
    Abort,
    ConnectResults,
    Forget,
    FromServer,
    Halt,
    InstanceEvent,
    KeepCopy,
    ReleaseCopies,
    Report,
    Say,
    StartCompute,
    StartPull,
    Stop,
    Suspend,
)
from triptych.ids import CopyId, Epoch, InstanceId, Role
from triptych.sim.coverage import Fault
from triptych.sim.greeting import greeting
from triptych.sim.holders import Holders
from triptych.sim.network import SERVER, Message, Network
from triptych.sim.worker import SimWorker
from triptych.sim.world import Clock, World
from triptych.wire.manifest import Manifest
from triptych.wire.messages import Lease


class SimInstance:
    """One instance over all its lives. ``peers``: all instances by id, to pull from. ``to_server``: its way there."""

    def __init__(
        self,
        world: World,
        network: Network,
        holders: Holders,
        instance: InstanceId,
        roles: tuple[Role, ...],
        peers: dict[InstanceId, SimInstance],
        to_server: Callable[[Message], None],
    ) -> None:
        self.id = instance
        self.roles = roles
        self._world = world
        self._network = network
        self._holders = holders
        self._peers = peers
        self._to_server = to_server
        self._clock = Clock(world)
        self._lives = 0
        self.alive = False
        self._frozen_until = 0.0
        self._back_in: float | None = None
        self.start()

    @property
    def pool(self) -> dict[CopyId, Manifest]:
        """The copies that it keeps."""
        return self._worker.pool.copies

    def keeps(self, manifest: Manifest) -> bool:
        """Whether a copy of this life can be pulled from it."""
        return self.alive and self.epoch == manifest.epoch and manifest.copy in self.pool

    @property
    def awake(self) -> bool:
        """Whether it lives and is not frozen."""
        return self.alive and self._world.now >= self._frozen_until

    @property
    def leaving(self) -> bool:
        """Whether it was asked to leave and the life after has not begun."""
        return self._back_in is not None

    # -- lives -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new life with nothing of the old one."""
        if self.alive:
            return
        plan = self._world.plan
        self._lives += 1
        if self._lives > 1:
            self._world.coverage.faults[Fault.RESTART] += 1
        self._clock.reset()
        self.epoch = Epoch(f"{self.id}/{self._lives}")
        self.alive = True
        self._back_in = None
        self.machine = InstanceMachine(greeting(self.id, self.epoch, self.roles, plan))
        self._worker = SimWorker(
            self._world,
            self._network,
            self.id,
            self.epoch,
            kept=lambda manifest: self._peers[manifest.producer].keeps(manifest),
            feed=self._feed,
            later=self._later,
        )
        self.server_of: dict[Lease, Epoch | None] = {}
        """The server life that each lease was begun under."""
        self._timer = float("inf")
        self._leases: tuple[Lease, ...] = ()
        """Those that the machine held when it was last looked at."""
        self._feed(Tick())

    def crash(self) -> None:
        """End this life without a word."""
        if self.alive:
            self._world.strike(Fault.CRASH, self.id)
            self._end_life()

    def break_down(self) -> None:
        """End this life over something inside it, which it still says."""
        if self.alive:
            self._world.strike(Fault.BREAKDOWN, self.id)
            self._feed(Stop(reason="the compute thread died", failed=True))

    def _end_life(self) -> None:
        self.alive = False
        self._leases = ()
        self._holders.update(self.id, frozenset())

    def leave(self, *, back_in: float | None = None) -> None:
        """End this life in good order; ``back_in`` seconds after that the next one begins."""
        if self.alive:
            self._world.strike(Fault.DEPARTURE, self.id)
            self._back_in = back_in
            self._feed(Stop(reason="asked to stop", seconds=self._world.plan.drain_seconds))

    def freeze(self, seconds: float) -> None:
        """Neither hear nor say nor do anything for a while."""
        self._world.strike(Fault.FREEZE, self.id, seconds)
        self._frozen_until = max(self._frozen_until, self._world.now + seconds)

    def jump(self, seconds: float) -> None:
        """The clock goes ahead."""
        self._world.strike(Fault.CLOCK_JUMP, self.id, seconds)
        self._clock.jump(seconds)

    def arrive(self, message: Message) -> None:
        """A message has reached the process of whatever life."""
        assert isinstance(message, FromServer)
        if self.alive:
            self._later(0.0, lambda: self._feed(message))

    def _later(self, delay: float, action: Callable[[], object]) -> None:
        """Do something in this life, unless it is over then; not while frozen."""
        epoch = self.epoch

        def act() -> None:
            if not self.alive or self.epoch != epoch:
                return
            if self._world.now < self._frozen_until:
                self._world.at(self._frozen_until, act)
                return
            action()

        self._world.after(delay, act)

    # -- the machine -------------------------------------------------------------------------------------------------

    def _feed(self, event: InstanceEvent) -> bool:
        """Whether this life goes on after it."""
        world = self._world
        if not isinstance(event, Tick):
            world.note(self.id, event)
        for action in self.machine.handle(event, self._clock.now):
            match action:
                case Say(message=message) | Report(message=message):
                    self._network.send(self.id, SERVER, Received(message=message), self._to_server)
                case StartPull(lease=lease):
                    self.server_of[lease] = self.machine.server_epoch
                    self._worker.pull(action)
                case StartCompute(lease=lease):
                    self.server_of.setdefault(lease, self.machine.server_epoch)
                    self._worker.compute(lease)
                case Abort(lease=lease):
                    self._worker.abort(lease)
                case Suspend(lease=lease):
                    self._worker.suspend(lease)
                case KeepCopy():
                    self._worker.keep(action)
                case ReleaseCopies(copies=copies):
                    self._worker.release(copies)
                case Forget() | ConnectResults() | Count():
                    pass
                case Halt(error=error):
                    if error is not None:
                        raise world.violation(f"{self.id} halted: {error}")
                    self._end_life()
                    if self._back_in is not None:
                        world.after(self._back_in, self.start)
                        self._back_in = None
                case _:
                    assert_never(action)
        if self.alive:
            self._note_leases()
            self._set_timer()
        return self.alive

    def _note_leases(self) -> None:
        leases = self.machine.leases
        if leases != self._leases:
            self._leases = leases
            self._holders.update(self.id, frozenset((self.server_of.get(lease), lease) for lease in leases))

    def _set_timer(self) -> None:
        now = self._clock.now
        when = self.machine.next_deadline(now)
        if when < self._timer:
            self._timer = when
            self._later(max(1e-6, when - now), lambda: self._ring(when))

    def _ring(self, when: float) -> None:
        if self._timer == when:
            self._timer = float("inf")
            self._feed(Tick())
