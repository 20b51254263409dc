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
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.sim.world import Message, World
from triptych.wire.manifest import Manifest
from triptych.wire.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    Finished,
    Hello,
    Lease,
    MediaFile,
    Outcome,
    Output,
    Staged,
    StageFailed,
    Stopped,
    replace,
)
from triptych.wire.schema import RequestSchema

SCHEMA = RequestSchema(
    model="simulated", pipeline="Simulated", split="modular", task="text-to-video", output="video", params=()
)


class SimInstance:
    """One instance over all its lives. ``peers``: all instances by id, to pull from. ``to_server``: its way there."""

    def __init__(
        self,
        world: World,
        instance: InstanceId,
        roles: tuple[Role, ...],
        peers: dict[InstanceId, SimInstance],
        to_server: Callable[[Received], None],
    ) -> None:
        self.id = instance
        self.roles = roles
        self._world = world
        self._peers = peers
        self._to_server = to_server
        self._lives = 0
        self.alive = False
        self._frozen_until = 0.0
        self._back_in: float | None = None
        self.start()

    # -- lives -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new life with nothing of the old one."""
        if self.alive:
            return
        plan = self._world.plan
        self._lives += 1
        self.epoch = Epoch(f"{self.id}/{self._lives}")
        self.alive = True
        self.machine = InstanceMachine(
            Hello(
                instance=self.id,
                epoch=self.epoch,
                server_epoch=None,
                protocol=PROTOCOL_VERSION,
                roles=self.roles,
                work_url=f"tcp://{self.id}",
                host="host",
                slots=plan.slots,
                pool_bytes=plan.pool_bytes,
                planes=("simulated",),
                schema=SCHEMA,
                fingerprint="equal",
                device="cpu",
            )
        )
        self.pool: dict[CopyId, Manifest] = {}
        self.server_of: dict[Lease, Epoch | None] = {}
        """The server life that each lease was begun under."""
        self._inputs: dict[Lease, tuple[Manifest, ...]] = {}
        self._aborted: set[Lease] = set()
        self._spare: dict[CopyId, None] = {}
        """Copies that yield to others."""
        self._resume: dict[Lease, Manifest] = {}
        self._suspended: set[Lease] = set()
        self._saved_at = 0.0
        self._copies = 0
        self._timer = float("inf")
        self._line: list[Lease] = []
        """Leases of the compute thread; the first one is being computed."""
        self._feed(Tick())

    def crash(self) -> None:
        """End this life without a word."""
        self.alive = False
        self._world.note(self.id, "crash")

    def leave(self, *, back_in: float | None = None) -> None:
        """End this life in good order; ``back_in`` seconds after that the next one begins."""
        if self.alive:
            self._back_in = back_in
            self._feed(Stop(reason="asked to stop", seconds=self._world.plan.drain_seconds))

    def freeze(self, seconds: float) -> None:
        """Neither hear nor say nor do anything for a while."""
        self._world.note(self.id, f"freeze {seconds:.2f}")
        self._frozen_until = self._world.now + seconds

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
        for action in self.machine.handle(event, world.now):
            match action:
                case Say(message=message) | Report(message=message):
                    self._to_server(Received(message=message))
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
                    self._later(world.around(0.02), partial(self._keep, action))
                case ReleaseCopies(copies=copies):
                    for copy in copies:
                        self.pool.pop(copy, None)
                        self._spare.pop(copy, None)
                case Forget() | ConnectResults() | Count():
                    pass
                case Halt(error=error):
                    if error is not None:
                        raise world.violation(f"{self.id} halted: {error}")
                    self.alive = False
                    if self._back_in is not None:
                        world.after(self._back_in, self.start)
                        self._back_in = None
                case _:
                    assert_never(action)
        self._set_timer()

    def _set_timer(self) -> None:
        if self.alive:
            when = self.machine.next_deadline(self._world.now)
            if when < self._timer or self._timer <= self._world.now:
                self._timer = when
                self._later(max(0.0, when - self._world.now), lambda: self._ring(when))

    def _ring(self, when: float) -> None:
        if self._timer == when:
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
        if self._reachable(manifest) and self._make_room(spare=action.spare):
            mine = self._put(manifest.request, manifest.tree, f"kept.{manifest.copy}", spare=action.spare)
            self._feed(CopyKept(copy=manifest.copy, manifest=mine))

    def _reachable(self, manifest: Manifest) -> bool:
        peer = self._peers[manifest.producer]
        there = peer.alive and peer.epoch == manifest.epoch and manifest.copy in peer.pool
        return there and not self._world.chance(self._world.plan.pull_failure)

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
        return self._put(lease.request, f"checkpoint:{step}".encode(), f"{lease.attempt}@{step}", spare=True)

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
        return Output(consumer=consumer, manifest=self._put(lease.request, lease.role.encode(), name, spare=False))

    def _make_room(self, *, spare: bool) -> bool:
        """Drop what yields, oldest first; whether one more copy fits then."""
        plan = self._world.plan
        while self.pool and (len(self.pool) + 1) * plan.copy_bytes > plan.pool_bytes:
            if spare and not self._spare:
                return False
            oldest = next(iter(self._spare or self.pool))
            del self.pool[oldest]
            self._spare.pop(oldest, None)
            self._later(0.0, partial(self._feed, CopiesDropped(copies=(oldest,))))
        return True

    def _put(self, request: RequestId, tree: bytes, name: str, *, spare: bool) -> Manifest:
        plan = self._world.plan
        manifest = Manifest(
            copy=CopyId(f"{self.epoch}:{request}/{name}#{self._copies}"),
            request=request,
            producer=self.id,
            epoch=self.epoch,
            nbytes=plan.copy_bytes,
            checksum=0,
            tensors=(),
            tree=tree,
            locators=(),
        )
        self._copies += 1
        self.pool[manifest.copy] = manifest
        if spare:
            self._spare[manifest.copy] = None
        return manifest

    def _stopped(self, lease: Lease) -> Stopped:
        return Stopped(instance=self.id, epoch=self.epoch, server_epoch=None, lease=lease)
