"""The preview thread: makes small pictures of what is being denoised, and only as many as it finds time for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from triptych.core.instance_events import Stepped
from triptych.worker.failure import given_up
from triptych.worker.jobs import Post, PreviewJob
from triptych.worker.threads import WorkerThread

log = logging.getLogger(__name__)


class PreviewThread(WorkerThread[PreviewJob]):
    """Makes one picture at a time. Whoever has another meanwhile keeps it: a late picture is worth nothing."""

    def __init__(self, *, device: str, post: Callable[[Post], None]) -> None:
        super().__init__("preview", post, device)
        self._busy = threading.Event()

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._busy.is_set()

    def put(self, job: PreviewJob) -> None:
        """Give it a job; to be called by one thread only, and when it is `idle`."""
        self._busy.set()
        super().put(job)

    def handle(self, job: PreviewJob) -> None:
        """Make a picture and post it. One that cannot be made is not missed."""
        try:
            picture = job.make()
        except Exception as error:
            log.warning("no preview: request=%s %s", job.ticket.lease.request, given_up(error))
            picture = b""
        finally:
            self._busy.clear()
        if picture and not job.ticket.cancelled.is_set():
            self._post(Stepped(lease=job.ticket.lease, step=job.step, steps=job.steps, preview=picture))
