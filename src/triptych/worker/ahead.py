"""The denoising stage that follows, prepared while the one before it computes.

What a loop does before its first step, its timesteps, its latents, the inputs on the device, takes the host tens of
milliseconds, in which a GPU would stand still between two requests. It is done while the GPU is busy with a step of the
request before, on a stream of its own, which neither waits for that step nor delays it. What is made there is read by
the steps later, on the stream of the computation: the allocator is told, and the first step waits for it on the GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from triptych.errors import StageError
from triptych.ids import Role
from triptych.pipeline.stage import Preparable, Preparing, Resumable, RolePipeline, StageRun
from triptych.transport.data.protocol import Payload
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
        self._device = device
        self._job: ComputeJob | None = None
        self._begun: Begun | None = None
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def prepare(self, pipeline: RolePipeline, job: ComputeJob) -> None:
        """Bring the stage of ``job`` up to its first step, if it is one that can be; once."""
        if self._job is job or job.ticket.lease.role is not Role.DENOISER:
            return
        self.drop()
        if not isinstance(pipeline, Preparing) or not pipeline.prepares:
            return
        self._job = job
        with self._beside(job):
            try:
                self._begun = _prepared(begin(pipeline, job))
            except Exception as error:  # it will begin anew in its turn, and fail then if it must
                log.info("not prepared: request=%s: %s", job.ticket.lease.request, error)

    def take(self, job: ComputeJob) -> Begun | None:
        """The stage of ``job``, if it was prepared; then it is the caller's."""
        if self._job is not job:
            return None
        begun, self._begun, self._job = self._begun, None, None
        if begun is not None and self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        return begun

    def drop(self, job: ComputeJob | None = None) -> None:
        """Give up what was prepared; with a ``job``, if it is the stage of that one."""
        if job is not None and self._job is not job:
            return
        if self._begun is not None:
            self._begun.run.cancel()
        self._begun = self._job = None

    @contextmanager
    def _beside(self, job: ComputeJob) -> Generator[None]:
        """What runs within is put on the stream of its own; on a CPU nothing is."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream, self._done = torch.cuda.Stream(self._device), torch.cuda.Event()
        assert self._done is not None
        computing = torch.cuda.current_stream(self._device)
        own(job, self._stream)
        made = Made("cuda")
        with torch.cuda.stream(self._stream), made:
            yield
        for tensor in made.tensors:
            tensor.record_stream(computing)
        self._done.record(self._stream)


def own(job: ComputeJob, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream reads the inputs of a job, which another stream brought."""
    payloads = job.inputs if job.resume is None else (*job.inputs, job.resume)
    for tensor in (t for p in payloads for t in p.tensors if t.is_cuda):
        tensor.record_stream(stream)


class Made(TorchDispatchMode):
    """Holds all that is made on one kind of device, with what is gone again: its memory could be given to another."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [
            leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.device.type == self._device
        ]
        return result


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
