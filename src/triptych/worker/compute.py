"""The compute thread: the only one that touches the model; it advances its requests in turn, one step at a time.

Between two steps it looks at what has come in and at who was cancelled, so nothing waits longer than a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from triptych.core.instance_events import ComputeStarted, Ended, Stepped
from triptych.errors import StageError
from triptych.ids import Role
from triptych.pipeline.stage import Resumable, RolePipeline, StageResult, StageRun
from triptych.transport.data.protocol import Payload
from triptych.worker.failure import failed, stopped
from triptych.worker.jobs import (
    CheckpointJob,
    Close,
    ComputeJob,
    Identity,
    Loaded,
    MediaJob,
    Post,
    StageJob,
    Ticket,
)
from triptych.worker.threads import WorkerThread


@dataclass(kw_only=True, slots=True)
class _Running:
    """A stage in the making."""

    ticket: Ticket
    run: StageRun
    wanted: str | None
    """Output format that the request asked for."""
    seconds: float
    """Time spent on it so far, without the turns of others."""
    step: int
    saved_at: float
    """When its last checkpoint was taken, or it began; seconds of `time.monotonic`."""
    saving: threading.Event | None = None
    """Set once its last checkpoint is staged."""


class ComputeThread(WorkerThread[ComputeJob]):
    """Runs stages of one pipeline on one device.

    ``load`` brings the pipeline into memory, in this thread. A finished stage goes on to ``stage`` (state for the
    next role) or ``encode`` (clips). ``max_running`` stages interleave. Every ``checkpoint_interval`` seconds (0:
    never) a denoising stage that can gives a checkpoint to ``stage``.
    """

    def __init__(
        self,
        *,
        load: Callable[[], RolePipeline],
        device: str,
        max_running: int,
        checkpoint_interval: float = 0.0,
        identity: Identity,
        post: Callable[[Post], None],
        stage: Callable[[StageJob | CheckpointJob], None],
        encode: Callable[[MediaJob], None],
    ) -> None:
        super().__init__("compute", post)
        self._load = load
        self._device = torch.device(device)
        self._max_running = max_running
        self._checkpoint_interval = checkpoint_interval
        self._identity = identity
        self._stage = stage
        self._encode = encode
        self._waiting: deque[ComputeJob] = deque()
        self._running: deque[_Running] = deque()
        self._in_flight: SimpleQueue[torch.cuda.Event] = SimpleQueue()

    def work(self) -> None:
        """Load, then turn by turn until closed."""
        torch.set_grad_enabled(False)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        begun = time.perf_counter()
        pipeline = self._load()
        self._post(
            Loaded(
                schema=pipeline.schema,
                fingerprint=pipeline.fingerprint,
                device=self._device_name(),
                seconds=time.perf_counter() - begun,
            )
        )
        while self._take_jobs():
            self._drop_cancelled()
            while self._waiting and len(self._running) < self._max_running:
                self._begin(pipeline, self._waiting.popleft())
            if self._running:
                self._turn(self._running.popleft())
        for running in self._running:
            running.run.cancel()

    def handle(self, job: ComputeJob) -> None:
        """Take a job into the queue of this thread."""
        self._waiting.append(job)

    def _take_jobs(self) -> bool:
        """Move what has come in to the waiting line; block only when there is nothing to do. False: closed."""
        idle = not self._waiting and not self._running
        while idle or not self._jobs.empty():
            job = self._jobs.get()
            if isinstance(job, Close):
                return False
            self.handle(job)
            idle = False
        return True

    def _drop_cancelled(self) -> None:
        for job in [j for j in self._waiting if j.ticket.cancelled.is_set() or j.ticket.suspended.is_set()]:
            self._waiting.remove(job)
            self._post(Ended(outcome=stopped(self._identity, job.ticket.lease)))

    def _begin(self, pipeline: RolePipeline, job: ComputeJob) -> None:
        lease = job.ticket.lease
        self._post(ComputeStarted(lease=lease))
        begun = time.perf_counter()
        try:
            self._own(job)
            run = pipeline.start(lease.role, job.params, [(p.tree, p.tensors) for p in job.inputs], job.images)
            if job.resume is not None:
                _restore(run, job.resume)
        except Exception as error:
            self._fail(job.ticket, error)
            return
        wanted = job.params.get("output_format")
        self._running.appendleft(
            _Running(
                ticket=job.ticket,
                run=run,
                wanted=wanted,
                seconds=time.perf_counter() - begun,
                step=run.step,
                saved_at=time.monotonic(),
            )
        )

    def _own(self, job: ComputeJob) -> None:
        """Tell the allocator that this thread's stream reads the inputs, which another stream brought."""
        payloads = job.inputs if job.resume is None else (*job.inputs, job.resume)
        for tensor in (t for p in payloads for t in p.tensors if t.is_cuda):
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def _turn(self, running: _Running) -> None:
        """Advance one stage to its next step boundary."""
        ticket = running.ticket
        if ticket.cancelled.is_set():
            running.run.cancel()
            self._post(Ended(outcome=stopped(self._identity, ticket.lease)))
            return
        if ticket.suspended.is_set():
            self._suspend(running)
            return
        begun = time.perf_counter()
        try:
            result = running.run.advance()
            self._keep_pace(finished=result is not None)
        except Exception as error:
            running.run.cancel()
            self._fail(ticket, error)
            return
        running.seconds += time.perf_counter() - begun
        if running.run.step != running.step:
            running.step = running.run.step
            self._post(Stepped(lease=ticket.lease, step=running.step, steps=running.run.steps))
        if result is None:
            self._running.append(running)
            self._save_if_due(running)
        else:
            self._hand_on(running, result)

    def _save_if_due(self, running: _Running) -> None:
        interval = self._checkpoint_interval
        if not interval or running.ticket.lease.role is not Role.DENOISER:
            return
        if time.monotonic() < running.saved_at + interval or not (running.saving is None or running.saving.is_set()):
            return
        running.saved_at = time.monotonic()
        if (job := self._checkpoint(running, last=False)) is not None:
            running.saving = job.saved
            self._stage(job)

    def _suspend(self, running: _Running) -> None:
        """Stop a run for good, with a checkpoint if it can give one."""
        job = self._checkpoint(running, last=True)
        running.run.cancel()
        if job is None:
            self._post(Ended(outcome=stopped(self._identity, running.ticket.lease)))
        else:
            self._stage(job)

    def _checkpoint(self, running: _Running, *, last: bool) -> CheckpointJob | None:
        """What the stage thread has to save; None when there is nothing to save or the run cannot be continued."""
        run = running.run
        if not isinstance(run, Resumable):
            return None
        try:
            frozen = run.checkpoint()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # another stream will read it
        except torch.OutOfMemoryError:
            return None
        if frozen is None:
            return None
        tree, tensors = frozen
        payload = Payload(tree=tree, tensors=tensors)
        return CheckpointJob(ticket=running.ticket, frozen=payload, step=run.step, steps=run.steps, last=last)

    def _hand_on(self, running: _Running, result: StageResult) -> None:
        ticket, seconds = running.ticket, running.seconds
        if ticket.lease.role is Role.DECODER:
            job = MediaJob(ticket=ticket, clips=result.clips, wanted=running.wanted, compute_seconds=seconds)
            self._encode(job)
        else:
            self._stage(StageJob(ticket=ticket, outputs=result.outputs, compute_seconds=seconds))

    def _keep_pace(self, *, finished: bool) -> None:
        """Let the host run at most one step ahead of a GPU, and not at all once a stage is finished.

        Otherwise steps would be reported, and cancellations obeyed, as they are launched rather than as they are done.
        """
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._in_flight.put(event)
        while self._in_flight.qsize() > (0 if finished else 1):
            self._in_flight.get().synchronize()

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """Report one request's failure. Raises when the device itself is beyond use.

        A CUDA error sticks to the process: every later request would fail of it, so it must not go on.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._post(Ended(outcome=failed(self._identity, ticket.lease, error)))

    def _device_name(self) -> str:
        if self._device.type == "cuda":
            return f"{self._device} {torch.cuda.get_device_name(self._device)}"
        return str(self._device)


def _restore(run: StageRun, resume: Payload) -> None:
    if not isinstance(run, Resumable):
        raise StageError("a run of this pipeline cannot resume from a checkpoint", retryable=True)
    run.restore(resume.tree, resume.tensors)
