"""The compute thread: the only one that touches the model; it advances its requests in turn, one step at a time.

Between two steps it looks at what has come in and at who was cancelled, so nothing waits longer than a step.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from triptych.accel.tally import Tally
from triptych.config import Shape
from triptych.core.instance_events import ComputeStarted, Ended, Stepped
from triptych.ids import Role
from triptych.pipeline.frames import FrameStream
from triptych.pipeline.stage import (
    Announcing,
    Clip,
    Previewing,
    RolePipeline,
    StageResult,
    Streaming,
    Together,
)
from triptych.worker.ahead import Ahead, begin, tensors
from triptych.worker.beside import own
from triptych.worker.failure import failed, given_up, stopped
from triptych.worker.jobs import (
    CheckpointJob,
    Close,
    ComputeJob,
    Identity,
    Loaded,
    MediaJob,
    Post,
    PreviewJob,
    StageJob,
    Ticket,
)
from triptych.worker.precedence import Precedence
from triptych.worker.preview import PreviewThread
from triptych.worker.running import Running
from triptych.worker.saving import Saver
from triptych.worker.threads import WorkerThread
from triptych.worker.turnover import Turnover
from triptych.worker.unwarmed import unwarmed

log = logging.getLogger(__name__)


class ComputeThread(WorkerThread[ComputeJob]):
    """Runs stages of one pipeline on one device.

    ``load`` brings the pipeline into memory, in this thread. A finished stage goes on to ``stage`` (state for the
    next role) or ``encode`` (clips). ``max_running`` stages interleave; where they share forwards, as
    many at once as pay off, and who is due first (`Precedence`) goes first. Every ``checkpoint_interval`` seconds (0:
    never) a denoising stage that can gives a checkpoint to ``stage``. What compiles during a step shows in ``tally``,
    and in the log with what the request has that is not among the shapes ``warmed``.
    """

    def __init__(
        self,
        *,
        load: Callable[[], RolePipeline],
        device: str,
        max_running: int,
        checkpoint_interval: float = 0.0,
        tally: Tally,
        warmed: Sequence[Shape] = (),
        identity: Identity,
        post: Callable[[Post], None],
        stage: Callable[[StageJob | CheckpointJob], None],
        encode: Callable[[MediaJob], None],
        show: PreviewThread | None = None,
    ) -> None:
        super().__init__("compute", post, device)
        self._load = load
        self._max_running = max_running
        self._saver = Saver(checkpoint_interval, self._device, stage)
        self._tally = tally
        self._warmed = warmed
        self._stepping: Callable[[], str] | None = None
        """Says of the present step what it computes, until that was said."""
        tally.compiling = self._compiles
        self._identity = identity
        self._stage = stage
        self._encode = encode
        self._show = show
        self._waiting: deque[ComputeJob] = deque()
        self._running: deque[Running] = deque()
        self._numbers = itertools.count()
        self._turnover = Turnover(tally)
        self._precedence = Precedence(max_running)
        self._ahead = Ahead(self._device)
        self._in_flight: SimpleQueue[torch.cuda.Event] = SimpleQueue()

    def work(self) -> None:
        """Load, then turn by turn until closed."""
        torch.set_grad_enabled(False)
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
        busy = False  # with a step that was launched and need not be done yet
        while self._take_jobs():
            self._drop_cancelled()
            self._running = deque(running for running in self._running if not self._stops(running))
            while self._waiting and len(self._running) < self._max_running:
                if busy:
                    self._ahead.prepare(pipeline, self._waiting[0])
                self._begin(pipeline, self._waiting.popleft())
            if busy and self._waiting:
                self._ahead.prepare(pipeline, self._waiting[0])
            if self._running:
                self._turn(pipeline, self._next(pipeline))
            busy = bool(self._running)
        self._ahead.drop()
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
            self._ahead.drop(job)
            self._post(Ended(outcome=stopped(self._identity, job.ticket.lease)))

    def _begin(self, pipeline: RolePipeline, job: ComputeJob) -> None:
        lease = job.ticket.lease
        self._post(ComputeStarted(lease=lease))
        try:
            if self._device.type == "cuda":
                own(tensors(job), torch.cuda.current_stream(self._device))
            begun = self._ahead.take(job) or begin(pipeline, job)
        except Exception as error:
            self._refuse(job.ticket, error)
            return
        run = begun.run
        running = Running(
            number=next(self._numbers),
            ticket=job.ticket,
            run=run,
            params=job.params,
            wanted=job.params.get("output_format"),
            seconds=begun.seconds,
            step=run.step,
            saved_at=time.monotonic(),
            computes=self._turnover.begins(job.ticket, alone=not self._running),
        )
        if isinstance(run, Streaming):
            run.stream_to(lambda clips: self._stream(running, clips))
        if lease.role is Role.DENOISER and isinstance(run, Announcing):
            run.announce(running.computes)
            running.computes = _nothing
        self._running.appendleft(running)

    def _stream(self, running: Running, clips: tuple[Clip, ...]) -> None:
        """Frames of a stage come while it goes on: from now on its lease is in the hands of whoever writes the file."""
        running.streams = tuple(clip.frames for clip in clips if isinstance(clip.frames, FrameStream))
        self._encode(MediaJob(ticket=running.ticket, clips=clips, wanted=running.wanted))

    def _next(self, pipeline: RolePipeline) -> list[Running]:
        """The stage whose turn it is, or those that share forwards and of which it is one."""
        first = self._running[0]
        role = first.ticket.lease.role
        if role is Role.DECODER or not isinstance(pipeline, Together) or not pipeline.joins:
            return [self._running.popleft()]
        alike = sorted((r for r in self._running if r.ticket.lease.role is role), key=lambda r: (r.due, r.number))
        who = pipeline.companions([running.run for running in alike], alike.index(first))
        group, late = [alike[index] for index in who.advance], [alike[index] for index in who.wait]
        others = [running for running in self._running if running not in group and running not in late]
        self._running = deque((*others, *late))  # kinds of stages take turns, whoever waits in them
        return group

    def _turn(self, pipeline: RolePipeline, group: list[Running]) -> None:
        """Advance stages to their next step boundary, at once if there are several."""
        for running in group:
            running.computes()
            running.computes = _nothing
        begun, compiled = time.perf_counter(), self._tally.compilations
        first, schema = group[0], pipeline.schema
        self._stepping = told = lambda: (
            f"request={first.ticket.lease.request}: {unwarmed(first.params, schema, self._warmed)}"
        )
        results = self._advance(pipeline, group)
        self._stepping = None
        seconds = time.perf_counter() - begun
        self._precedence.computed(len(group))
        if self._tally.compilations != compiled:
            log.warning(
                "compiled %d graphs in a stage of %.1f s: %s", self._tally.compilations - compiled, seconds, told()
            )
        for running, result in zip(group, results, strict=True):
            running.seconds += seconds / len(group)
            self._advanced(running, result)

    def _compiles(self) -> None:
        """A compilation begins: say so before it has held everything up, once a step."""
        told, self._stepping = self._stepping, None
        if told is not None:
            log.warning("compiling, which may take minutes in which nothing else is computed: %s", told())

    def _stops(self, running: Running) -> bool:
        """Stop a stage that was asked to; whether it was."""
        ticket = running.ticket
        if ticket.cancelled.is_set():
            running.run.cancel()
            self._post(Ended(outcome=stopped(self._identity, ticket.lease)))
            return True
        if ticket.suspended.is_set():
            saved = self._saver.save_last(running)
            running.run.cancel()
            if not saved:
                self._post(Ended(outcome=stopped(self._identity, ticket.lease)))
            return True
        return False

    def _advance(self, pipeline: RolePipeline, group: list[Running]) -> list[StageResult | Exception | None]:
        """What one step of each gave or raised."""
        results: list[StageResult | Exception | None]
        try:
            if len(group) > 1:
                assert isinstance(pipeline, Together)
                results = pipeline.advance_together([running.run for running in group])
            else:
                results = [group[0].run.advance()]
            self._keep_pace(finished=any(results))
        except Exception as error:
            return [error] * len(group)
        return results

    def _advanced(self, running: Running, result: StageResult | Exception | None) -> None:
        """Report what a step gave, and go on or hand on."""
        ticket = running.ticket
        if result is not None:
            self._turnover.ended()
        if isinstance(result, Exception):
            running.run.cancel()
            self._fail(running, result)
            return
        for stream in running.streams:
            stream.close(running.seconds / len(running.streams))
        if running.streams:
            return
        if running.run.step != running.step:
            running.step = running.run.step
            self._post(Stepped(lease=ticket.lease, step=running.step, steps=running.run.steps))
            self._preview(running)
        if result is None:
            running.due = running.due or self._precedence.due(running.run.steps - running.run.step)
            self._running.append(running)
            self._saver.save_if_due(running)
        else:
            self._hand_on(running, result)

    def _preview(self, running: Running) -> None:
        """Have a picture made elsewhere, if one is wanted and the thread for it has nothing to do."""
        run = running.run
        if self._show is None or not isinstance(run, Previewing) or not self._show.idle:
            return
        try:
            make = run.preview()
        except Exception as error:
            log.warning("no preview: request=%s %s", running.ticket.lease.request, given_up(error))
            return
        if make is not None:
            self._show.put(PreviewJob(ticket=running.ticket, step=running.step, steps=run.steps, make=make))

    def _hand_on(self, running: Running, result: StageResult) -> None:
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

    def _fail(self, running: Running, error: Exception) -> None:
        """Report the failure of a stage, or have it reported by who writes its file. See `_refuse`."""
        if not running.streams:
            self._refuse(running.ticket, error)
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for stream in running.streams:
            stream.fail(error)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
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


def _nothing() -> None:
    """What is to be called of a stage that has long begun to compute."""
