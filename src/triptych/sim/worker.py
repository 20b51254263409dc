"""A modelled instance: the real instance machine over a worker whose pulls, stages and pool are made of delays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from triptych.core.events import Count, Received, Tick
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import (
    Abort,
    CheckpointMade,
    ComputeStarted,
    ConnectResults,
    CopiesDropped,
    CopyKept,
    Ended,
    Forget,
    FromServer,
    Halt,
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
)
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, Role
from triptych.sim.coverage import Fault
from triptych.sim.greeting import greeting
from triptych.sim.holders import Holders
from triptych.sim.network import SERVER, Message, Network
from triptych.sim.pool import SimPool
from triptych.sim.world import Clock, World
from triptych.wire.manifest import Manifest
from triptych.wire.messages import (
    ErrorInfo,
    Finished,
    Lease,
    MediaFile,
    Outcome,
    Output,
    Staged,
    StageFailed,
    Stopped,
    replace,
)


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
        return self._pool.copies

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
        self._pool = SimPool(self.id, self.epoch, plan.pool_bytes, plan.copy_bytes)
        self.server_of: dict[Lease, Epoch | None] = {}
        """The server life that each lease was begun under."""
        self._inputs: dict[Lease, tuple[Manifest, ...]] = {}
        self._aborted: set[Lease] = set()
        self._resume: dict[Lease, Manifest] = {}
        self._suspended: set[Lease] = set()
        self._to_keep: set[CopyId] = set()
        """Copies of others that are wanted here and not yet."""
        self._saved_at = 0.0
        self._timer = float("inf")
        self._leases: tuple[Lease, ...] = ()
        """Those that the machine held when it was last looked at."""
        self._line: list[Lease] = []
        """Leases of the compute thread; the first one is being computed."""
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

    def _feed(self, event: InstanceEvent) -> None:
        world = self._world
        if not isinstance(event, Tick):
            world.note(self.id, event)
        for action in self.machine.handle(event, self._clock.now):
            match action:
                case Say(message=message) | Report(message=message):
                    self._network.send(self.id, SERVER, Received(message=message), self._to_server)
                case StartPull():
                    self._start_pull(action)
                case StartCompute(lease=lease):
                    self.server_of.setdefault(lease, self.machine.server_epoch)
                    self._line.append(lease)
                    if len(self._line) == 1:
                        self._begin()
                case Abort(lease=lease):
                    self._abort(lease)
                case Suspend(lease=lease):
                    self._suspend(lease)
                case KeepCopy():
                    self._to_keep.add(action.manifest.copy)
                    self._later(world.around(0.02), partial(self._keep, action))
                case ReleaseCopies(copies=copies):
                    self._to_keep.difference_update(copies)
                    for copy in copies:
                        self._pool.release(copy)
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

    # -- pulls -------------------------------------------------------------------------------------------------------

    def _start_pull(self, action: StartPull) -> None:
        world, lease = self._world, action.lease
        self.server_of[lease] = self.machine.server_epoch
        self._inputs[lease] = action.inputs
        self._check_inputs(lease, action.inputs)
        if action.resume is not None:
            self._check_resume(lease, action.resume)
            self._resume[lease] = action.resume
        self._later(world.around(0.02), lambda: self._end_pull(lease))

    def _check_inputs(self, lease: Lease, inputs: tuple[Manifest, ...]) -> None:
        expected = {Role.DENOISER: [Role.ENCODER], Role.DECODER: [Role.DENOISER]}[lease.role]
        if self._world.plan.encoder_feeds_decoder and lease.role is Role.DECODER:
            expected = [Role.ENCODER, Role.DENOISER]
        made_by = [Role(manifest.tree.decode()) for manifest in inputs]
        if made_by != expected or any(manifest.request != lease.request for manifest in inputs):
            raise self._world.violation(f"{lease} got inputs {inputs}")

    def _check_resume(self, lease: Lease, manifest: Manifest) -> None:
        maker, _, step = manifest.tree.decode().partition(":")
        fits = lease.role is Role.DENOISER and maker == "checkpoint" and 0 < int(step) < self._world.plan.steps
        if not fits or manifest.request != lease.request:
            raise self._world.violation(f"{lease} is to resume from {manifest}")

    def _keep(self, action: KeepCopy) -> None:
        """Pull a copy to keep it, if it is still there and there is room."""
        manifest = action.manifest
        if manifest.copy not in self._to_keep:
            return
        self._to_keep.discard(manifest.copy)
        if self._reachable(manifest) and self._make_room(spare=action.spare):
            mine = self._pool.put(manifest.request, manifest.tree, f"kept.{manifest.copy}", spare=action.spare)
            self._feed(CopyKept(copy=manifest.copy, manifest=mine))

    def _reachable(self, manifest: Manifest) -> bool:
        world, peer = self._world, self._peers[manifest.producer]
        there = peer.alive and peer.epoch == manifest.epoch and manifest.copy in peer.pool
        if there and self._network.connected(self.id, peer.id) and not world.chance(world.plan.pull_failure):
            return True
        world.strike(Fault.PULL_FAILED, self.id, manifest.copy)
        return False

    def _end_pull(self, lease: Lease) -> None:
        if lease in self._aborted:
            self._feed(Ended(outcome=self._stopped(lease)))
            return
        resume = (self._resume[lease],) if lease in self._resume else ()
        for manifest in (*self._inputs[lease], *resume):
            if not self._reachable(manifest):
                error = ErrorInfo(code="transfer_failed", message="gone", blame="instance", retryable=True)
                self._feed(PullFailed(lease=lease, copy=manifest.copy, error=error))
                return
        self._feed(Pulled(lease=lease, seconds=0.02, nbytes=100, plane="simulated"))

    # -- compute -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        world, lease = self._world, self._line[0]
        self._feed(ComputeStarted(lease=lease))
        if lease.role is Role.DENOISER:
            done = int(self._resume[lease].tree.decode().partition(":")[2]) if lease in self._resume else 0
            self._saved_at = world.now
            self._later(world.around(world.plan.step_seconds), lambda: self._step(lease, done + 1))
        else:
            self._later(world.around(world.plan.stage_seconds), lambda: self._end(self._outcome(lease)))

    def _step(self, lease: Lease, step: int) -> None:
        world = self._world
        if lease in self._aborted:
            self._end(self._stopped(lease))
            return
        self._feed(Stepped(lease=lease, step=step, steps=world.plan.steps))
        if step == world.plan.steps:
            self._end(self._outcome(lease))
        elif lease in self._suspended:
            checkpoint = self._checkpoint(lease, step)
            self._end(replace(self._stopped(lease), checkpoint=checkpoint, step=step, steps=world.plan.steps))
        else:
            interval = world.plan.checkpoint_interval
            if interval and world.now >= self._saved_at + interval:
                self._saved_at = world.now
                if (manifest := self._checkpoint(lease, step)) is not None:
                    self._feed(CheckpointMade(lease=lease, manifest=manifest, step=step, steps=world.plan.steps))
            self._later(world.around(world.plan.step_seconds), lambda: self._step(lease, step + 1))

    def _checkpoint(self, lease: Lease, step: int) -> Manifest | None:
        able = self._world.random.random() < self._world.plan.resumable
        if not able or not self._make_room(spare=True):
            return None
        return self._pool.put(lease.request, f"checkpoint:{step}".encode(), f"{lease.attempt}@{step}", spare=True)

    def _suspend(self, lease: Lease) -> None:
        self._suspended.add(lease)
        if lease in self._line[1:]:
            self._line.remove(lease)
            self._later(0.0, lambda: self._feed(Ended(outcome=self._stopped(lease))))

    def _abort(self, lease: Lease) -> None:
        self._aborted.add(lease)
        if lease in self._line[1:]:
            self._line.remove(lease)
            self._later(0.0, lambda: self._feed(Ended(outcome=self._stopped(lease))))

    def _end(self, outcome: Outcome) -> None:
        self._line.pop(0)
        self._feed(Ended(outcome=outcome))
        if self._line and self.alive:
            self._begin()

    def _outcome(self, lease: Lease) -> Outcome:
        world = self._world
        if lease in self._aborted:
            return self._stopped(lease)
        hopeless = world.chance(world.plan.hopeless)
        if hopeless or world.chance(world.plan.stage_failure):
            world.strike(Fault.STAGE_HOPELESS if hopeless else Fault.STAGE_FAILED, self.id, lease)
            error = ErrorInfo(code="stage_failed", message="simulated", blame="instance", retryable=not hopeless)
            return StageFailed(instance=self.id, epoch=self.epoch, server_epoch=None, lease=lease, error=error)
        if lease.role is Role.DECODER:
            file = MediaFile(blob=0, mime="video/mp4", suffix=".mp4", width=8, height=8, frames=1, fps=8.0, checksum=0)
            return Finished(
                instance=self.id,
                epoch=self.epoch,
                server_epoch=None,
                lease=lease,
                files=(file,),
                compute_seconds=0.1,
                encode_seconds=0.0,
            )
        return Staged(
            instance=self.id,
            epoch=self.epoch,
            server_epoch=None,
            lease=lease,
            outputs=tuple(self._stage(lease, consumer) for consumer in self._consumers(lease.role)),
            compute_seconds=0.1,
            stage_seconds=0.0,
        )

    def _consumers(self, role: Role) -> list[Role]:
        after = ROLES[ROLES.index(role) + 1]
        return [after, Role.DECODER] if role is Role.ENCODER and self._world.plan.encoder_feeds_decoder else [after]

    def _stage(self, lease: Lease, consumer: Role) -> Output:
        self._make_room(spare=False)
        name = f"{lease.role}.{lease.attempt}>{consumer}"
        return Output(consumer=consumer, manifest=self._pool.put(lease.request, lease.role.encode(), name, spare=False))

    def _make_room(self, *, spare: bool) -> bool:
        """Drop what yields; whether one more copy fits then."""
        fits, dropped = self._pool.make_room(spare=spare)
        for copy in dropped:
            self._world.strike(Fault.POOL_FULL, self.id, copy)
            self._later(0.0, partial(self._feed, CopiesDropped(copies=(copy,))))
        return fits

    def _stopped(self, lease: Lease) -> Stopped:
        return Stopped(instance=self.id, epoch=self.epoch, server_epoch=None, lease=lease)
