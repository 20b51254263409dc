"""The media thread: clips to files, beside the computation of the next request."""

from __future__ import annotations

import time
from collections.abc import Callable

from triptych.core.instance_events import Ended
from triptych.errors import StageError
from triptych.wire.messages import Finished
from triptych.worker.failure import failed, stopped
from triptych.worker.jobs import Identity, MediaJob, MediaReady, Post
from triptych.worker.media import EncodingCancelled, encode_clip
from triptych.worker.threads import WorkerThread


class MediaThread(WorkerThread[MediaJob]):
    """Writes the files of finished requests, one request at a time."""

    def __init__(self, *, device: str, identity: Identity, post: Callable[[Post], None]) -> None:
        super().__init__("media", post, device)
        self._identity = identity

    def handle(self, job: MediaJob) -> None:
        """Encode every clip of a request; cancellation is honoured between two frames."""
        lease = job.ticket.lease
        begun = time.monotonic()
        try:
            if not job.clips:
                raise StageError("the decoder came to its end without any media")
            files = [encode_clip(clip, job.wanted, cancelled=job.ticket.cancelled.is_set) for clip in job.clips]
        except EncodingCancelled:
            self._post(Ended(outcome=stopped(self._identity, lease)))
            return
        except Exception as error:
            self._post(Ended(outcome=failed(self._identity, lease, error)))
            return
        outcome = Finished(
            instance=self._identity.instance,
            epoch=self._identity.epoch,
            server_epoch=None,
            lease=lease,
            files=tuple(file.describe(number) for number, file in enumerate(files)),
            compute_seconds=job.seconds(),
            encode_seconds=time.monotonic() - begun,
        )
        self._post(MediaReady(outcome=outcome, files=tuple(file.data for file in files)))
