"""Everything that is kept of jobs: records in memory, journal and images on disk, media in their store."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from triptych.config import ServerConfig
from triptych.core.events import JobState, JobView
from triptych.core.journal import Accepted, Deleting, Finish, JournalEntry, Stored
from triptych.errors import StorageFailed, StorageFull
from triptych.ids import RequestId
from triptych.server.acceptance import Order, entry_of, note_of, revive
from triptych.server.archive import Archive, DiskArchive, NoArchive, Remembered
from triptych.server.disposal import Disposal
from triptych.server.idempotency import IdempotencyKey, Keys
from triptych.server.media_remote import RemoteMedia
from triptych.server.media_store import LocalMedia, MediaStore
from triptych.server.readiness import StorageState
from triptych.server.records import Entry, IdMint, Records, StoredFile
from triptych.server.saved import SavedFiles
from triptych.wire.messages import MediaFile

log = logging.getLogger(__name__)

STORE_THREADS = 4
"""Media files written at the same time."""
READ_THREADS = 16
"""Media files brought from a remote store, or looked for there, at the same time, by threads of their own: a store that
hangs stops who asks for its files, and nobody else."""
LOOK_SECONDS = 10.0
"""Within which the media store should say how it is."""
READ_SECONDS = 600.0
"""How long bringing a file may take."""

P = ParamSpec("P")
T = TypeVar("T")


class Keeper:
    """Keeps records, journal, media and keys in step. All methods belong to the loop's thread."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._media: MediaStore = LocalMedia(config.output_dir)
        if config.media_store is not None:
            self._media = RemoteMedia(config.media_store, config.output_dir)
        self._archive: Archive = NoArchive() if config.state_dir is None else DiskArchive(config.state_dir)
        self._mint = IdMint()
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="media-store")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="media-read")
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="media-look")
        """A look that waited for large files to be stored would say that the store is silent."""
        self._background: set[asyncio.Task[Any]] = set()
        self.records = Records(config.retained_jobs, self._forget, retained_bytes=config.retained_bytes)
        self.saved = SavedFiles(self.records, config.output_dir, config.state_dir, self.note, self.fetch)
        self.keys = Keys()
        self._storing: set[RequestId] = set()
        self._media_trouble = ""
        self._looking_since: float | None = None
        self._disposal = Disposal(
            lambda files: self.in_thread(self._media.remove, files), self._archive.forget, time.monotonic
        )

    # -- life --------------------------------------------------------------------------------------------------

    async def open(self) -> list[Remembered]:
        """Open the stores; returns the jobs of earlier lives in order of acceptance, the ended ones before.

        Raises `ConfigError` for a state folder in use, and `StorageFailed` for a folder that cannot be used.
        """
        await self.in_thread(self._media.open)
        try:
            remembered = await self.in_thread(self._archive.open)
        except BaseException:
            await self.in_thread(self._archive.close)
            raise
        ended = [job for job in remembered if not job.history.live]
        ended.sort(key=lambda job: job.history.ended().completed_at)
        return ended + [job for job in remembered if job.history.live]

    def start(self) -> None:
        """Begin to write the journal."""
        self._archive.start()

    async def rest(self, seconds: float) -> None:
        """Return once everything that was begun in the background has ended, after ``seconds`` at the latest."""
        if self._background:
            await asyncio.wait(self._background, timeout=seconds)

    async def close(self, seconds: float) -> None:
        """Write what was noted and let go of the files. What hangs for longer than ``seconds`` is left alone: threads
        cannot be stopped, and the next life of the server takes it up again. Idempotent."""
        for task in self._background:
            task.cancel()
        closing = asyncio.ensure_future(asyncio.to_thread(self._archive.close))
        await asyncio.wait((closing,), timeout=seconds)
        for threads in (self._threads, self._readers, self._looker):
            threads.shutdown(wait=False, cancel_futures=True)
        if closing.done():
            closing.result()
        else:
            log.error("the journal could not be closed within %g s", seconds)

    # -- one job -----------------------------------------------------------------------------------------------

    async def accept(self, order: Order, key: IdempotencyKey | None) -> Entry:
        """Write a new job down, then remember it. Raises `BadRequest`, `StorageFull` or `StorageFailed`."""
        self._media.check_room()
        order.check_images()
        accepted = Accepted(
            request=self._mint(order.output),
            output=order.output,
            params=order.params,
            metadata=order.metadata,
            images=len(order.images),
            queue_timeout=order.queue_timeout,
            run_timeout=order.run_timeout,
            created_at=time.time(),
            key="" if key is None else key.name,
            digest="" if key is None else key.digest,
        )
        await self._archive.accept(accepted, order.images)
        entry = entry_of(accepted)
        entry.kept_bytes = sum(map(len, order.images)) if self._keeps_images(entry) else 0
        self.records.add(entry)
        return entry

    async def images(self, entry: Entry) -> tuple[bytes, ...]:
        """What was uploaded with a job, as far as it is kept. Raises `StorageFailed`."""
        return await self._archive.images(entry.id)

    def revive(self, job: Remembered) -> Entry | None:
        """Remember a job of an earlier life as that left it; returns it if it has yet to be brought to its end.

        To be called for all of them in one go: which files are to be saved is seen when all are known.
        """
        accepted = job.history.accepted
        entry = revive(job, self._media)
        entry.kept_bytes = job.kept_bytes or (sum(map(len, job.images)) if self._keeps_images(entry) else 0)
        self._mint.after(entry.id)
        if job.history.deleting:
            self._forget(entry)
            return None
        if entry.key:
            self.keys.remember(entry.key, accepted.digest, entry.id)
        if entry.ended and entry.view.state is not JobState.DONE and entry.files:
            self.spawn(self._disposal.clear(entry.id, entry.files, rows=False))
            entry.files = ()
        self.records.add(entry)
        if not entry.ended:
            return entry
        if job.history.finish is None:
            self._note_end(entry, entry.view)
        self._save(entry)
        return None

    def update(self, entry: Entry, view: JobView) -> None:
        """A job's new state."""
        self.records.update(entry, view)
        if entry.completed_at is not None:
            self._note_end(entry, view)
            self._save(entry)
            if entry.images and not self._keeps_images(entry):
                self.spawn(self._archive.drop_images(entry.id))

    async def store(self, request: RequestId, files: Sequence[tuple[MediaFile, bytes]]) -> None:
        """Keep the files of a job that is about to end; raises `StorageFull` or `StorageFailed`."""
        self._storing.add(request)
        try:
            await self._store(request, files)
        finally:
            self._storing.discard(request)

    async def find(self, request: RequestId, name: str) -> StoredFile | None:
        """A file of a job of another server that uses the same media store. Raises `StorageFailed`."""
        if self._disposal.condemned(request) or request in self._storing:  # a job of ours that was deleted
            return None
        return await self._read(self._media.find, name)

    async def fetch(self, file: StoredFile) -> Path:
        """Where a file lies on this machine, once it does. Raises `FileNotFoundError` or `StorageFailed`."""
        if file.source is not None and not await asyncio.to_thread(file.source.has, file.name):
            await self._read(file.source.fetch, file.name)
        return file.path

    async def _read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        work = functools.partial(call, *args, **kwargs)
        try:
            return await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(self._readers, work), timeout=READ_SECONDS
            )
        except TimeoutError as error:
            raise StorageFailed(f"the media store has not answered within {READ_SECONDS:g} seconds") from error

    async def _store(self, request: RequestId, files: Sequence[tuple[MediaFile, bytes]]) -> None:
        stored = await self.in_thread(self._media.store, request, files)
        entry = self.records.find(request)
        if entry is None or entry.ended:  # cancelled or deleted while its files were being written
            await self._disposal.clear(request, stored, rows=False)
            return
        entry.files = stored
        notes = tuple(note_of(file) for file in stored)
        self.note(Stored(request=request, files=notes, stored_at=time.time()))
        await self.settle()  # the decoder forgets its copy after this
        if entry.ended and entry.files:
            entry.files = ()
            await self._disposal.clear(request, stored, rows=False)

    def free_key(self, entry: Entry) -> None:
        """Have the key of a job that is being deleted stand for nothing: the same request again is a new one."""
        self.keys.forget(entry.key, entry.id)

    async def erase(self, entry: Entry) -> None:
        """Delete everything of a job, now or when its store can be reached; the next server ends what a killed one has
        begun."""
        self.records.remove(entry)
        self._disposal.condemn(entry.id)
        self.free_key(entry)
        self.note(Deleting(request=entry.id))
        await self.settle()
        await self._disposal.clear(entry.id, entry.files, rows=True)

    def expire(self) -> None:
        """Forget what is older than is to be kept, and delete what could not be deleted before."""
        if self._disposal.due:
            self.spawn(self._disposal.retry())
        if self._config.retained_seconds is not None:
            self.records.expire(time.time() - self._config.retained_seconds)

    def look(self) -> None:
        """See whether files can be stored, aside and one look at a time; about once a second."""
        if self._looking_since is None:
            self._looking_since = time.monotonic()
            self.spawn(self._look())

    async def _look(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._looker, self._media.look)
            self._media_trouble = ""
        except (StorageFull, StorageFailed) as error:
            if error.message != self._media_trouble:
                log.error("files cannot be stored: %s", error)
            self._media_trouble = error.message
        finally:
            self._looking_since = None

    def state(self) -> StorageState:
        """What keeps jobs or files from being kept at the moment."""
        media, room = self._media_trouble, True
        try:
            self._media.check_room()
        except StorageFull as error:
            media, room = error.message, False
        if self._looking_since is not None and (since := time.monotonic() - self._looking_since) > LOOK_SECONDS:
            media = f"no answer for {since:.0f} seconds"
        journal = self._archive.trouble
        return StorageState(journal=journal, media=media, refusing=bool(journal) or not room)

    def note(self, entry: JournalEntry) -> None:
        """Write down what became of a job, soon."""
        self._archive.note(entry)

    async def settle(self) -> None:
        """Return once the notes so far are written down, or could not be."""
        await self._archive.settle()

    # -- inside ------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something in the background; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Do something that blocks in the thread pool."""
        return asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(call, *args, **kwargs))

    def _keeps_images(self, entry: Entry) -> bool:
        """Whether a job's images stay as long as it does: a video may be remixed."""
        return entry.output == "video" and self._config.state_dir is not None

    def _note_end(self, entry: Entry, view: JobView) -> None:
        assert entry.completed_at is not None
        self.note(Finish(view=view, started_at=entry.started_at, completed_at=entry.completed_at))

    def _save(self, entry: Entry) -> None:
        if self.saved.due(entry):
            self.spawn(self._quietly(self.saved.ensure(entry.id)))

    def _forget(self, entry: Entry) -> None:
        self._disposal.condemn(entry.id)
        self.free_key(entry)  # at once: a request that came with it now would be told of a job that is gone
        self.spawn(self.erase(entry))

    async def _quietly(self, work: Awaitable[object]) -> None:
        try:
            await work
        except StorageFailed as error:
            log.error("what was left to do for a job that is over failed: %s", error)
