"""What a server keeps of its jobs beyond its own life: on disk, or nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from triptych.core.journal import Accepted, History, JournalEntry, replay
from triptych.errors import StorageFailed, StorageFull
from triptych.ids import RequestId
from triptych.server.journal import Journal
from triptych.server.uploads import Uploads

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remembered:
    """One job of an earlier life."""

    history: History
    images: tuple[bytes, ...] = ()
    """As they were uploaded; empty for a job that has ended."""
    lost: str = ""
    """Why its images cannot be had; empty when they can."""
    kept_bytes: int = 0
    """What its images take on the disk, of a job that has ended."""


class Archive(Protocol):
    """Where accepted jobs are written down."""

    @property
    def trouble(self) -> str:
        """Why no job can be accepted at the moment; empty when they can."""
        ...

    def open(self) -> list[Remembered]:
        """The jobs of earlier lives in order of acceptance. Blocking. Raises `ConfigError` or `StorageFailed`."""
        ...

    def start(self) -> None:
        """Begin to write, on the loop's thread."""
        ...

    async def accept(self, accepted: Accepted, images: Sequence[bytes]) -> None:
        """Return once the job cannot be lost any more. Raises `StorageFull` or `StorageFailed`, and keeps nothing
        of it then."""
        ...

    def note(self, entry: JournalEntry) -> None:
        """Write down what became of a job, soon."""
        ...

    async def settle(self) -> None:
        """Return once the notes so far are kept, or could not be: that is logged, and they are tried again."""
        ...

    async def images(self, request: RequestId) -> tuple[bytes, ...]:
        """The images of a job; none where they were dropped. Raises `StorageFailed` for damaged ones."""
        ...

    async def drop_images(self, request: RequestId) -> None:
        """Delete the images of a job that has ended."""
        ...

    async def forget(self, request: RequestId) -> None:
        """Delete everything about a job."""
        ...

    def close(self) -> None:
        """Write what was noted and let go of the files. Blocking. Idempotent."""
        ...


class NoArchive:
    """Keeps nothing: the jobs of this server end with it."""

    trouble = ""

    def open(self) -> list[Remembered]:
        """Nothing."""
        return []

    def start(self) -> None:
        """Nothing to start."""

    async def accept(self, accepted: Accepted, images: Sequence[bytes]) -> None:
        """Every job is good."""

    def note(self, entry: JournalEntry) -> None:
        """Nothing is written."""

    async def settle(self) -> None:
        """Nothing to wait for."""

    async def images(self, request: RequestId) -> tuple[bytes, ...]:
        """None."""
        return ()

    async def drop_images(self, request: RequestId) -> None:
        """There are none."""

    async def forget(self, request: RequestId) -> None:
        """Forgotten already."""

    def close(self) -> None:
        """Nothing to close."""


class DiskArchive:
    """A journal and the uploaded images beside it, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder)
        self._uploads = Uploads(folder / "images")

    @property
    def trouble(self) -> str:
        """See `Archive.trouble`."""
        return "" if self._journal.trouble is None else self._journal.trouble.message

    def open(self) -> list[Remembered]:
        """See `Archive.open`."""
        histories = replay(self._journal.open())
        self._uploads.open()
        self._uploads.sweep({request for request, history in histories.items() if history.live or _remixable(history)})
        return [self._remember(history) for history in histories.values()]

    def _remember(self, history: History) -> Remembered:
        if not history.live:
            return Remembered(history=history, kept_bytes=self._uploads.size(history.accepted.request))
        if not history.accepted.images:
            return Remembered(history=history)
        try:
            return Remembered(history=history, images=self._uploads.load(history.accepted.request))
        except StorageFailed as error:
            log.error("%s", error)
            return Remembered(history=history, lost=error.message)

    def start(self) -> None:
        """See `Archive.start`."""
        self._journal.start()

    async def accept(self, accepted: Accepted, images: Sequence[bytes]) -> None:
        """See `Archive.accept`."""
        if not images:
            await self._journal.accept(accepted)
            return
        await asyncio.to_thread(self._uploads.save, accepted.request, images)
        try:
            await self._journal.accept(accepted)
        except BaseException:
            await asyncio.to_thread(self._uploads.remove, accepted.request)
            raise

    def note(self, entry: JournalEntry) -> None:
        """See `Archive.note`."""
        self._journal.note(entry)

    async def settle(self) -> None:
        """See `Archive.settle`."""
        try:
            await self._journal.flush()
        except (StorageFull, StorageFailed) as error:
            log.error("what became of some jobs is not written down yet: %s", error)

    async def images(self, request: RequestId) -> tuple[bytes, ...]:
        """See `Archive.images`."""
        if not await asyncio.to_thread(self._uploads.size, request):
            return ()
        return await asyncio.to_thread(self._uploads.load, request)

    async def drop_images(self, request: RequestId) -> None:
        """See `Archive.drop_images`. Its end must be written first: a live job needs its images."""
        try:
            await self._journal.flush()
        except (StorageFull, StorageFailed) as error:
            log.error("the images of %s stay until the next start: %s", request, error)
            return
        await asyncio.to_thread(self._uploads.remove, request)

    async def forget(self, request: RequestId) -> None:
        """See `Archive.forget`."""
        await asyncio.to_thread(self._uploads.remove, request)
        self._journal.purge(request)
        await self.settle()

    def close(self) -> None:
        """See `Archive.close`."""
        self._journal.close()


def _remixable(history: History) -> bool:
    """Whether a job that has ended may be asked for once more with what it began with: videos may."""
    return history.accepted.output == "video" and not history.deleting
