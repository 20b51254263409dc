"""What the server remembers of every job: its request, its state and its files, bounded in number."""

from __future__ import annotations

import asyncio
import bisect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

from triptych.core.events import JobState, JobView
from triptych.core.states import TERMINAL, is_running
from triptych.errors import BadRequest, NotFound
from triptych.ids import RequestId

OutputKind: TypeAlias = Literal["video", "image"]


TASK_ID: Final = "task_id"
"""Where a job's metadata has the name that its client gave it."""
SAVE_PATH: Final = "save_result_path"
"""Where a job's metadata has the path, under the output folder, at which its client wants the file."""

_INDEXED: Final = (TASK_ID, SAVE_PATH)


class Source(Protocol):
    """Brings files of a remote store to the local disk."""

    def has(self, name: str) -> bool:
        """Whether it lies there already; that counts as a use of it. Blocking, but never on the store."""
        ...

    def fetch(self, name: str) -> None:
        """Have the file of that name at its path. Blocking. Raises `FileNotFoundError` or `StorageFailed`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A finished media file in the media store."""

    name: str
    """File name inside the store; made of the job's id."""
    path: Path
    """Where it lies on this machine, once `fetch` was called."""
    mime: str
    suffix: str
    nbytes: int
    width: int
    height: int
    frames: int
    fps: float
    """0 for an image."""
    source: Source | None = field(default=None, compare=False, repr=False)
    """What fetches it; None when it is local anyway."""

    def fetch(self) -> Path:
        """Its path, where it lies from now on. Blocking; raises as `Source.fetch` does."""
        if self.source is not None:
            self.source.fetch(self.name)
        return self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """One job as it was when this record was read; times are Unix seconds."""

    id: RequestId
    output: OutputKind
    params: dict[str, Any]
    metadata: dict[str, str]
    created_at: float
    started_at: float | None
    completed_at: float | None
    view: JobView
    files: tuple[StoredFile, ...]

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.view.state in TERMINAL


class Entry:
    """A job in memory. One mutable object per job, so that an update costs no copy of what does not change."""

    __slots__ = (
        "completed_at",
        "created_at",
        "files",
        "id",
        "images",
        "kept_bytes",
        "key",
        "metadata",
        "output",
        "params",
        "saved",
        "started_at",
        "timings_seen",
        "view",
        "waiters",
        "watchers",
    )

    def __init__(
        self,
        request: RequestId,
        output: OutputKind,
        params: dict[str, Any],
        metadata: dict[str, str],
        view: JobView,
        *,
        created_at: float | None = None,
        key: str = "",
        images: int = 0,
    ) -> None:
        self.id = request
        self.output: OutputKind = output
        self.params = params
        self.metadata = metadata
        self.created_at = time.time() if created_at is None else created_at
        self.started_at: float | None = None
        self.completed_at: float | None = None
        self.view = view
        self.files: tuple[StoredFile, ...] = ()
        self.key = key
        """Name of its idempotency key; empty when it has none."""
        self.images = images
        """How many images were uploaded with it."""
        self.kept_bytes = 0
        """What these images take on the disk once it has ended."""
        self.saved: str | None = None
        """What went wrong when its files were brought to `SAVE_PATH`; empty when nothing did, None before."""
        self.timings_seen = 0
        self.waiters: list[asyncio.Future[None]] = []
        """Woken at the end of the job."""
        self.watchers: list[asyncio.Future[None]] = []
        """Woken at the next change; each reader puts at most one future here, so slow readers hold nothing."""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.view.state in TERMINAL

    @property
    def nbytes(self) -> int:
        """Bytes of its media, and of the images that are kept with it."""
        return self.kept_bytes + sum(file.nbytes for file in self.files)

    def record(self, view: JobView | None = None) -> JobRecord:
        """The job as it was at its last update, or in ``view`` if that is newer."""
        return JobRecord(
            id=self.id,
            output=self.output,
            params=self.params,
            metadata=self.metadata,
            created_at=self.created_at,
            started_at=self.started_at,
            completed_at=self.completed_at,
            view=view or self.view,
            files=self.files,
        )

    def wake_watchers(self) -> None:
        """Let every reader that waits for a change look again."""
        watchers, self.watchers = self.watchers, []
        _wake(watchers)

    def wake_all(self) -> None:
        """Let everybody who waits for anything look again."""
        self.wake_watchers()
        waiters, self.waiters = self.waiters, []
        _wake(waiters)


async def turn(waiting: list[asyncio.Future[None]]) -> None:
    """Wait in a list of an entry until woken; leaves nothing behind when cancelled."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting.append(future)
    try:
        await future
    except asyncio.CancelledError:
        if future in waiting:
            waiting.remove(future)
        raise


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _age(request: RequestId) -> str:
    """What ids of all kinds sort by."""
    return request.partition("_")[2]


def _marks(entry: Entry) -> list[tuple[str, str]]:
    """By what else than its id a job is found."""
    return [(key, value) for key in _INDEXED if (value := entry.metadata.get(key))]


class IdMint:
    """Ids that sort by age and cannot be guessed: kind, milliseconds, a counter within them, 64 random bits."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self, output: OutputKind) -> RequestId:
        """A new id, greater than all before it of the same kind even when the clock steps back."""
        self._last = max(self._last + 1, int(time.time() * 1000) << 16)
        return RequestId(f"{output}_{self._last:016x}{os.urandom(8).hex()}")

    def after(self, request: RequestId) -> None:
        """Make every later id greater than one of an earlier life of the server."""
        self._last = max(self._last, int(request.partition("_")[2][:16], 16))

    @staticmethod
    def is_id(value: str, output: OutputKind) -> bool:
        """Whether ``value`` has the form of an id of that kind."""
        kind, _, rest = value.partition("_")
        return kind == output and len(rest) == 32 and all(c in "0123456789abcdef" for c in rest)


class Records:
    """Jobs by id. Of ended ones, at most ``retained`` are kept, with at most ``retained_bytes`` of media
    (the last one is kept however large it is), live ones always.

    ``forget`` is given every job that is dropped for room, so that its media can go with it.
    """

    def __init__(self, retained: int, forget: Callable[[Entry], None], *, retained_bytes: int | None = None) -> None:
        self._retained = retained
        self._retained_bytes = retained_bytes
        self._forget = forget
        self._bytes = 0
        self._entries: dict[RequestId, Entry] = {}
        self._by_age: dict[OutputKind, list[RequestId]] = {output: [] for output in get_args(OutputKind)}
        """Ids of each kind, sorted: entries come in another order after a restart, or when one's images took long."""
        self._having: dict[tuple[str, str], list[RequestId]] = {}
        """Ids in order of age by what the metadata has under an indexed key."""
        self._ended: dict[RequestId, None] = {}
        """Ended jobs in the order of their end."""
        self.states: dict[JobState, int] = dict.fromkeys(JobState, 0)
        """How many remembered jobs are in each state."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Remember a new job, or one that has ended, then in the order of their ends."""
        self._entries[entry.id] = entry
        bisect.insort(self._by_age[entry.output], entry.id)
        for mark in _marks(entry):
            bisect.insort(self._having.setdefault(mark, []), entry.id, key=_age)
        self.states[entry.view.state] += 1
        if entry.ended:
            self._end(entry)

    def find(self, request: RequestId) -> Entry | None:
        """The job of that id, or None."""
        return self._entries.get(request)

    def get(self, request: RequestId) -> Entry:
        """The job of that id; raises `NotFound`."""
        entry = self._entries.get(request)
        if entry is None:
            raise NotFound(f"no job has the id {request!r}")
        return entry

    def having(self, key: str, value: str) -> list[Entry]:
        """The jobs whose metadata has ``value`` under ``key`` (`TASK_ID` or `SAVE_PATH`), oldest first."""
        return [self._entries[request] for request in self._having.get((key, value), ())]

    def update(self, entry: Entry, view: JobView) -> None:
        """A job's new state; wakes who watches it. The final state is the last one taken."""
        before = entry.view.state
        if before in TERMINAL:
            return
        after = view.state
        entry.view = view
        if after is not before:
            self.states[before] -= 1
            self.states[after] += 1
            if entry.started_at is None and is_running(after):
                entry.started_at = time.time()
            if after in TERMINAL:
                entry.completed_at = time.time()
                self._end(entry)
                entry.wake_all()
                return
        if entry.watchers:
            entry.wake_watchers()

    def remove(self, entry: Entry) -> None:
        """Forget a job."""
        if self._entries.pop(entry.id, None) is not None:
            ids = self._by_age[entry.output]
            del ids[bisect.bisect_left(ids, entry.id)]
            for mark in _marks(entry):
                self._having[mark].remove(entry.id)
                if not self._having[mark]:
                    del self._having[mark]
            if entry.id in self._ended:
                del self._ended[entry.id]
                self._bytes -= entry.nbytes
            self.states[entry.view.state] -= 1
            entry.wake_all()

    def expire(self, ended_before: float) -> None:
        """Drop every job that ended before this Unix time, with its media."""
        while self._ended:
            oldest = self._entries[next(iter(self._ended))]
            if oldest.completed_at is None or oldest.completed_at >= ended_before:
                return
            self.remove(oldest)
            self._forget(oldest)

    def page(
        self, *, output: OutputKind, after: RequestId | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[list[Entry], bool]:
        """At most ``limit`` jobs of one kind by age from behind ``after`` on, and whether there are more.

        A cursor stays good when its job is deleted, because ids sort by age.
        """
        if limit < 1:
            raise BadRequest("limit", f"limit={limit}: must be at least 1")
        if after is not None and not IdMint.is_id(after, output):
            raise BadRequest("after", f"after={after!r}: is not the id of a job of kind {output}")
        ids = self._by_age[output]
        if order == "asc":
            start = 0 if after is None else bisect.bisect_right(ids, after)
            found, more = ids[start : start + limit], start + limit < len(ids)
        else:
            end = len(ids) if after is None else bisect.bisect_left(ids, after)
            start = max(0, end - limit)
            found, more = ids[start:end][::-1], start > 0
        return [self._entries[request] for request in found], more

    def _end(self, entry: Entry) -> None:
        self._ended[entry.id] = None
        self._bytes += entry.nbytes
        while len(self._ended) > self._retained or (
            self._retained_bytes is not None and self._bytes > self._retained_bytes and len(self._ended) > 1
        ):
            oldest = self._entries[next(iter(self._ended))]
            self.remove(oldest)
            self._forget(oldest)
