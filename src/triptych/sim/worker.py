"""A modelled worker: pulls, stages and a pool that are made of delays, for one life of an instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from triptych.core.instance_events import (
    CheckpointMade,
    ComputeStarted,
    CopiesDropped,
    CopyKept,
    Ended,
    InstanceEvent,
    KeepCopy,
    Pulled,
    PullFailed,
    StartPull,
    Stepped,
)
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, Role
from triptych.sim.coverage import Fault
from triptych.sim.network import Network
from triptych.sim.pool import SimPool
from triptych.sim.world import World
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


class SimWorker:
    """What one life of an instance computes and keeps.

    ``kept``: whether the instance that made a copy still has it. ``feed``: tells the instance's machine, and says
    whether the life goes on. ``later``: does something after so many seconds, if the life goes on then.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        instance: InstanceId,
        epoch: Epoch,
        *,
        kept: Callable[[Manifest], bool],
        feed: Callable[[InstanceEvent], bool],
        later: Callable[[float, Callable[[], object]], None],
    ) -> None:
        self._world = world
        self._network = network
        self._id = instance
        self._epoch = epoch
        self._kept = kept
        self._feed = feed
        self._later = later
        self.pool = SimPool(instance, epoch, world.plan.pool_bytes, world.plan.copy_bytes)
        self._inputs: dict[Lease, tuple[Manifest, ...]] = {}
        self._aborted: set[Lease] = set()
        self._resume: dict[Lease, Manifest] = {}
        self._suspended: set[Lease] = set()
        self._to_keep: set[CopyId] = set()
        """Copies of others that are wanted here and not yet."""
        self._saved_at = 0.0
        self._line: list[Lease] = []
        """Leases of the compute thread; the first one is being computed."""

    # -- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, action: StartPull) -> None:
        """Begin to pull the inputs of a stage."""
        world, lease = self._world, action.lease
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

    def keep(self, action: KeepCopy) -> None:
        """Pull a copy to keep it, unless it is released before."""
        self._to_keep.add(action.manifest.copy)
        self._later(self._world.around(0.02), partial(self._keep, action))

    def release(self, copies: Iterable[CopyId]) -> None:
        """Free copies, and keep none of them that are yet to be pulled."""
        for copy in copies:
            self._to_keep.discard(copy)
            self.pool.release(copy)

    def _keep(self, action: KeepCopy) -> None:
        """The pull of a copy to keep has come to its end, well if it is still there and there is room."""
        manifest = action.manifest
        if manifest.copy not in self._to_keep:
            return
        self._to_keep.discard(manifest.copy)
        if self._reachable(manifest) and self._make_room(spare=action.spare):
            mine = self.pool.put(manifest.request, manifest.tree, f"kept.{manifest.copy}", spare=action.spare)
            self._feed(CopyKept(copy=manifest.copy, manifest=mine))

    def _reachable(self, manifest: Manifest) -> bool:
        world = self._world
        connected = self._kept(manifest) and self._network.connected(self._id, manifest.producer)
        if connected and not world.chance(world.plan.pull_failure):
            return True
        world.strike(Fault.PULL_FAILED, self._id, manifest.copy)
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

    def compute(self, lease: Lease) -> None:
        """Compute a stage once those before it are done."""
        self._line.append(lease)
        if len(self._line) == 1:
            self._begin()

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
        return self.pool.put(lease.request, f"checkpoint:{step}".encode(), f"{lease.attempt}@{step}", spare=True)

    def suspend(self, lease: Lease) -> None:
        """Stop a stage between two steps, with a checkpoint if it can have one."""
        self._suspended.add(lease)
        if lease in self._line[1:]:
            self._line.remove(lease)
            self._later(0.0, lambda: self._feed(Ended(outcome=self._stopped(lease))))

    def abort(self, lease: Lease) -> None:
        """Stop a stage between two steps."""
        self._aborted.add(lease)
        if lease in self._line[1:]:
            self._line.remove(lease)
            self._later(0.0, lambda: self._feed(Ended(outcome=self._stopped(lease))))

    def _end(self, outcome: Outcome) -> None:
        self._line.pop(0)
        if self._feed(Ended(outcome=outcome)) and self._line:
            self._begin()

    def _outcome(self, lease: Lease) -> Outcome:
        world = self._world
        if lease in self._aborted:
            return self._stopped(lease)
        hopeless = world.chance(world.plan.hopeless)
        if hopeless or world.chance(world.plan.stage_failure):
            world.strike(Fault.STAGE_HOPELESS if hopeless else Fault.STAGE_FAILED, self._id, lease)
            error = ErrorInfo(code="stage_failed", message="simulated", blame="instance", retryable=not hopeless)
            return StageFailed(instance=self._id, epoch=self._epoch, server_epoch=None, lease=lease, error=error)
        if lease.role is Role.DECODER:
            file = MediaFile(blob=0, mime="video/mp4", suffix=".mp4", width=8, height=8, frames=1, fps=8.0, checksum=0)
            return Finished(
                instance=self._id,
                epoch=self._epoch,
                server_epoch=None,
                lease=lease,
                files=(file,),
                compute_seconds=0.1,
                encode_seconds=0.0,
            )
        return Staged(
            instance=self._id,
            epoch=self._epoch,
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
        return Output(consumer=consumer, manifest=self.pool.put(lease.request, lease.role.encode(), name, spare=False))

    def _make_room(self, *, spare: bool) -> bool:
        """Drop what yields; whether one more copy fits then."""
        fits, dropped = self.pool.make_room(spare=spare)
        for copy in dropped:
            self._world.strike(Fault.POOL_FULL, self._id, copy)
            self._later(0.0, partial(self._feed, CopiesDropped(copies=(copy,))))
        return fits

    def _stopped(self, lease: Lease) -> Stopped:
        return Stopped(instance=self._id, epoch=self._epoch, server_epoch=None, lease=lease)
