"""Checkpoints of running stages: when one is due, and what is handed on to be kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from triptych.ids import Role
from triptych.pipeline.stage import Resumable
from triptych.transport.data.protocol import Payload
from triptych.worker.failure import given_up
from triptych.worker.jobs import CheckpointJob
from triptych.worker.running import Running

log = logging.getLogger(__name__)


class Saver:
    """Gives checkpoints of denoising stages to ``stage``: every ``interval`` seconds (0: never), and of one that is to
    stop. Used by the compute thread, between two steps."""

    def __init__(self, interval: float, device: torch.device, stage: Callable[[CheckpointJob], None]) -> None:
        self._interval = interval
        self._device = device
        self._stage = stage

    def save_if_due(self, running: Running) -> None:
        """Have a stage saved whose last checkpoint is old enough, and staged by now."""
        if not self._interval or running.ticket.lease.role is not Role.DENOISER:
            return
        saved = running.saving is None or running.saving.is_set()
        if time.monotonic() < running.saved_at + self._interval or not saved:
            return
        running.saved_at = time.monotonic()
        if (job := self._checkpoint(running, last=False)) is not None:
            running.saving = job.saved
            self._stage(job)

    def save_last(self, running: Running) -> bool:
        """Have a stage saved that is to stop; False when it cannot be continued from where it is."""
        job = self._checkpoint(running, last=True)
        if job is not None:
            self._stage(job)
        return job is not None

    def _checkpoint(self, running: Running, *, last: bool) -> CheckpointJob | None:
        """What the stage thread has to save; None when there is nothing to save or the run cannot be continued."""
        run = running.run
        if not isinstance(run, Resumable):
            return None
        try:
            frozen = run.checkpoint()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # another stream will read it
        except Exception as error:
            log.warning("no checkpoint request=%s step=%d: %s", running.ticket.lease.request, run.step, given_up(error))
            return None
        if frozen is None:
            return None
        tree, tensors = frozen
        payload = Payload(tree=tree, tensors=tensors)
        return CheckpointJob(ticket=running.ticket, frozen=payload, step=run.step, steps=run.steps, last=last)
