"""The denoising stage that follows, prepared while the one before it computes.

What a loop does before its first step, its timesteps, its latents, the inputs on the device, takes the host tens of
milliseconds, in which a GPU would stand still between two requests. It is done while the GPU is busy with a step of the
request before, on a stream of its own. Where several GPUs compute together, the pipeline has each of them do so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from triptych.errors import StageError
from triptych.ids import Role
from triptych.pipeline.stage import Preparable, Preparing, Resumable, RolePipeline, StageRun
from triptych.transport.data.protocol import Payload
from triptych.worker.beside import Beside
from triptych.worker.jobs import ComputeJob

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A stage that has begun, and the seconds that it took."""

    run: StageRun
    seconds: float


def begin(pipeline: RolePipeline, job: ComputeJob) -> Begun:
    """Start the stage of a job, where it is to go on from. Raises what that raises."""
    started = time.perf_counter()
    inputs = [(payload.tree, payload.tensors) for payload in job.inputs]
    run = pipeline.start(job.ticket.lease.role, job.params, inputs, job.images)
    if job.resume is not None:
        _restore(run, job.resume)
    return Begun(run=run, seconds=time.perf_counter() - started)


class Ahead:
    """At most one stage that was prepared. Used from the compute thread only."""

    def __init__(self, device: torch.device) -> None:
        self._beside = Beside(device)
        self._job: ComputeJob | None = None
        self._begun: Begun | None = None

    def prepare(self, pipeline: RolePipeline, job: ComputeJob) -> None:
        """Bring the stage of ``job`` up to its first step, if it is one that can be; once."""
        if self._job is job or job.ticket.lease.role is not Role.DENOISER:
            return
        self.drop()
        if not isinstance(pipeline, Preparing) or not pipeline.prepares:
            return
        self._job = job
        with self._beside.entered(tensors(job)):
            try:
                self._begun = _prepared(begin(pipeline, job))
            except Exception as error:  # it will begin anew in its turn, and fail then if it must
                log.info("not prepared: request=%s: %s", job.ticket.lease.request, error)

    def take(self, job: ComputeJob) -> Begun | None:
        """The stage of ``job``, if it was prepared; then it is the caller's."""
        if self._job is not job:
            return None
        begun, self._begun, self._job = self._begun, None, None
        if begun is not None:
            self._beside.join()
        return begun

    def drop(self, job: ComputeJob | None = None) -> None:
        """Give up what was prepared; with a ``job``, if it is the stage of that one."""
        if job is not None and self._job is not job:
            return
        if self._begun is not None:
            self._begun.run.cancel()
        self._begun = self._job = None


def tensors(job: ComputeJob) -> Iterator[torch.Tensor]:
    """All that a job has been given to read."""
    payloads = job.inputs if job.resume is None else (*job.inputs, job.resume)
    return (tensor for payload in payloads for tensor in payload.tensors)


def _prepared(begun: Begun) -> Begun:
    """The same stage before its first step, where that can be had; it is over where that fails."""
    started = time.perf_counter()
    try:
        if isinstance(begun.run, Preparable):
            begun.run.prepare()
    except Exception:
        begun.run.cancel()
        raise
    return Begun(run=begun.run, seconds=begun.seconds + time.perf_counter() - started)


def _restore(run: StageRun, resume: Payload) -> None:
    """Put a run that has just begun where a checkpoint was; it is over where that fails."""
    try:
        if not isinstance(run, Resumable):
            raise StageError("a run of this pipeline cannot resume from a checkpoint", retryable=True)
        run.restore(resume.tree, resume.tensors)
    except Exception:
        run.cancel()
        raise
