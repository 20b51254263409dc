"""The keeping thread: copies of other instances, brought here so that they outlive their makers.

Nobody waits for them, so they have a thread of their own, in which they stand in line behind each other and never
before the inputs of a request, and each is given up once nobody wants it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from triptych.core.instance_events import CopyKept
from triptych.ids import CopyId
from triptych.transport.data.protocol import DataPlane
from triptych.wire.manifest import Manifest
from triptych.worker.copying import CopyingThread
from triptych.worker.failure import given_up
from triptych.worker.jobs import KeepJob, Post
from triptych.worker.transfer import pull_deadline

log = logging.getLogger(__name__)


class KeepThread(CopyingThread[KeepJob]):
    """Pulls copies and stages them anew, one at a time."""

    def __init__(self, *, plane: DataPlane, device: str, post: Callable[[Post], None]) -> None:
        super().__init__("keep", post, device)
        self._plane = plane
        self._wanted: set[KeepJob] = set()
        """What is not done with; entered by control and struck out by this thread."""

    def put(self, job: KeepJob) -> None:
        """Give it a job."""
        self._wanted.add(job)
        super().put(job)

    def release(self, copies: Collection[CopyId]) -> None:
        """Nobody wants these copies of others kept any more."""
        for job in tuple(self._wanted):
            if job.manifest.copy in copies:
                job.cancelled.set()

    def close(self) -> None:
        """Let it end, with nothing more kept."""
        for job in tuple(self._wanted):
            job.cancelled.set()
        super().close()

    def handle(self, job: KeepJob) -> None:
        """Keep one copy. A failure is only logged: the copy stays where it was, or is made anew."""
        manifest = job.manifest
        kept: Manifest | None = None
        try:
            if not job.cancelled.is_set():
                pull = self._plane.pull(manifest, deadline=pull_deadline(manifest), cancelled=job.cancelled.is_set)
                kept = self._plane.stage(manifest.request, pull.payload, spare=job.spare)
                self._wait_for_copies()
        except Exception as error:
            if not job.cancelled.is_set():
                log.warning("not kept for %s: copy=%s %s", manifest.producer, manifest.copy, given_up(error))
            job.cancelled.set()
        self._wanted.discard(job)
        if kept is not None and job.cancelled.is_set():
            self._plane.release([kept.copy])
        elif kept is not None:
            self._post(CopyKept(copy=manifest.copy, manifest=kept))
