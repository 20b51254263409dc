"""The transfer threads: one kind pulls the inputs of coming stages, the other stages the outputs of finished ones.

They are apart so that a slow or dead sender never holds up what others wait for. On a GPU each has a stream of its own,
so that its copies run beside the computation, and waits for that stream before it says that something is done: what is
announced may be read, and what was read may be freed, from any other stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from triptych.accel.shortage import is_out_of_memory
from triptych.core.instance_events import CheckpointMade, Ended, Pulled, PullFailed
from triptych.errors import PoolFull, TooLarge
from triptych.ids import CopyId
from triptych.pipeline.checkpoint import lighter
from triptych.transport.data.protocol import DataPlane, Payload
from triptych.wire.manifest import Manifest
from triptych.wire.messages import Output, Staged, replace
from triptych.worker.copying import CopyingThread
from triptych.worker.failure import error_info, failed, given_up, stopped
from triptych.worker.jobs import (
    CheckpointJob,
    Close,
    Identity,
    InputsReady,
    Post,
    PullJob,
    StageJob,
)

_PULL_SECONDS: Final = 10.0
_PULL_BYTES_PER_SECOND: Final = 10e6
"""A pull may take this long, and longer for a large copy on the slowest network worth using."""

_ROOM_SECONDS: Final = 30.0
"""How long a finished stage waits for room in the pool before it is given up."""

log = logging.getLogger(__name__)

_CANCEL_CHECK_SECONDS: Final = 0.05


class PullThread(CopyingThread[PullJob]):
    """Pulls the inputs of leases while the compute thread works on others.

    Several may share one ``jobs`` queue.
    """

    def __init__(
        self,
        number: int,
        *,
        plane: DataPlane,
        device: str,
        identity: Identity,
        post: Callable[[Post], None],
        jobs: SimpleQueue[PullJob | Close],
    ) -> None:
        super().__init__(f"pull-{number}", post, device)
        self._jobs = jobs
        self._plane = plane
        self._identity = identity

    def handle(self, job: PullJob) -> None:
        """Pull every input, or post which one failed. Cancelled: what is pulled is let go."""
        ticket = job.ticket
        begun = time.monotonic()
        payloads: list[Payload] = []
        nbytes = 0
        planes: set[str] = set()
        for manifest in (*job.inputs, *((job.resume,) if job.resume is not None else ())):
            try:
                pull = self._plane.pull(
                    manifest,
                    deadline=pull_deadline(manifest),
                    cancelled=ticket.cancelled.is_set,
                )
                self._wait_for_copies()
            except Exception as error:
                if ticket.cancelled.is_set():
                    break
                if is_out_of_memory(error):  # which says nothing against the copy
                    self._post(Ended(outcome=failed(self._identity, ticket.lease, error)))
                    return
                info = error_info(ticket.lease.role, error)
                self._post(PullFailed(lease=ticket.lease, copy=manifest.copy, error=info))
                return
            payloads.append(pull.payload)
            nbytes += pull.nbytes
            planes.add(pull.plane)
        if ticket.cancelled.is_set():
            self._post(Ended(outcome=stopped(self._identity, ticket.lease)))
            return
        pulled = Pulled(
            lease=ticket.lease, seconds=time.monotonic() - begun, nbytes=nbytes, plane="+".join(sorted(planes))
        )
        resume = payloads.pop() if job.resume is not None else None
        self._post(InputsReady(ticket=ticket, inputs=tuple(payloads), pulled=pulled, resume=resume))


def pull_deadline(manifest: Manifest) -> float:
    """When a pull that begins now is given up; seconds of `time.monotonic`."""
    return time.monotonic() + _PULL_SECONDS + manifest.nbytes / _PULL_BYTES_PER_SECOND


class StageThread(CopyingThread[StageJob | CheckpointJob]):
    """Puts finished outputs and checkpoints into the pool.

    On a GPU it copies on a stream of its own, beside the next computation.
    """

    def __init__(self, *, plane: DataPlane, device: str, identity: Identity, post: Callable[[Post], None]) -> None:
        super().__init__("stage", post, device)
        self._plane = plane
        self._identity = identity
        self._room = threading.Event()

    def room_made(self) -> None:
        """Copies were released: what waits for room tries again."""
        self._room.set()

    def handle(self, job: StageJob | CheckpointJob) -> None:
        """Stage what the job holds."""
        if isinstance(job, CheckpointJob):
            self._save(job)
        else:
            self._stage_outputs(job)

    def _save(self, job: CheckpointJob) -> None:
        """Stage a checkpoint if there is room; without it the stage is only repeated from its beginning."""
        lease = job.ticket.lease
        manifest = None
        try:
            if not job.ticket.cancelled.is_set():
                manifest = self._stage_checkpoint(job)
                self._wait_for_copies()
        except Exception as error:
            log.warning("no checkpoint request=%s step=%d: %s", lease.request, job.step, given_up(error))
            if manifest is not None:
                self._plane.release([manifest.copy])
                manifest = None
        finally:
            job.saved.set()
        if job.last:
            outcome = stopped(self._identity, lease)
            if manifest is not None:
                outcome = replace(outcome, checkpoint=manifest, step=job.step, steps=job.steps)
            self._post(Ended(outcome=outcome))
        elif manifest is not None:
            self._post(CheckpointMade(lease=lease, manifest=manifest, step=job.step, steps=job.steps))

    def _stage_checkpoint(self, job: CheckpointJob) -> Manifest:
        """Stage it whole, or else without what can be computed anew. Raises `TooLarge` or `PoolFull`."""
        request = job.ticket.lease.request
        try:
            return self._plane.stage(request, job.frozen, spare=True)
        except (TooLarge, PoolFull) as error:
            less = lighter((job.frozen.tree, job.frozen.tensors))
            if less is None:
                raise
            manifest = self._plane.stage(request, Payload(tree=less[0], tensors=less[1]), spare=True)
            log.info(
                "checkpoint request=%s step=%d is without what step caching keeps: %s", request, job.step, error.message
            )
            return manifest

    def _stage_outputs(self, job: StageJob) -> None:
        """Stage all outputs or none."""
        lease = job.ticket.lease
        begun = time.monotonic()
        try:
            outputs = self._stage(job, deadline=begun + _ROOM_SECONDS)
        except Exception as error:
            outcome = failed(self._identity, lease, error)
        else:
            outcome = stopped(self._identity, lease)
            if outputs is not None:
                outcome = Staged(
                    instance=self._identity.instance,
                    epoch=self._identity.epoch,
                    server_epoch=None,
                    lease=lease,
                    outputs=outputs,
                    compute_seconds=job.compute_seconds,
                    stage_seconds=time.monotonic() - begun,
                )
        self._post(Ended(outcome=outcome))

    def _stage(self, job: StageJob, *, deadline: float) -> tuple[Output, ...] | None:
        """Try until there is room; None when the lease was cancelled meanwhile."""
        payloads = [Payload(tree=o.tree, tensors=o.tensors) for o in job.outputs]
        total = sum(p.nbytes for p in payloads)
        if total > self._plane.pool_bytes:
            raise TooLarge(
                f"The output of the {job.ticket.lease.role} stage takes {total} bytes and the transfer pool holds "
                f"{self._plane.pool_bytes}: ask for a smaller size or fewer frames, "
                "or raise --disagg-transfer-pool-size."
            )
        while not job.ticket.cancelled.is_set():
            self._room.clear()  # before the attempt, so that room made during it is not missed
            try:
                return self._stage_once(job, payloads)
            except PoolFull:
                if time.monotonic() >= deadline:
                    raise
            self._room.wait(_CANCEL_CHECK_SECONDS)
        return None

    def _stage_once(self, job: StageJob, payloads: Sequence[Payload]) -> tuple[Output, ...]:
        staged: list[Output] = []
        try:
            for output, payload in zip(job.outputs, payloads, strict=True):
                manifest = self._plane.stage(job.ticket.lease.request, payload)
                staged.append(Output(consumer=output.consumer, manifest=manifest))
            self._wait_for_copies()
            present = {m.copy for m in self._plane.copies()}
            if not all(o.manifest.copy in present for o in staged):
                raise PoolFull("no room for all outputs of one stage: staging the later ones displaced the earlier")
        except BaseException:
            self._plane.release(self._copies(staged))
            raise
        return tuple(staged)

    @staticmethod
    def _copies(staged: Sequence[Output]) -> tuple[CopyId, ...]:
        return tuple(o.manifest.copy for o in staged)
