"""What the journal holds of each request, and how its state is rebuilt from that.

Theory of operation. A request leaves few rows behind: it was accepted; who holds its lease; which stages are done and
where their outputs lie; what time it has used up; which files are stored; how it ended. Each kind of row stands once
for a request (`slot_of`), a later one in the place of the earlier one, and rows are read back in the order in which
they were written. Only the acceptance and the stored files must be on the disk before anybody is told of them. The
others may be lost with the last moments of a killed server: what is missing then is found out from the instances, or
done once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from triptych.core.events import Clocks, JobState, JobView, LeaseGranted, Restore, StageDone, StageTiming
from triptych.ids import ROLES, RequestId, Role
from triptych.wire.messages import Record


class Accepted(Record, frozen=True, kw_only=True, tag="accepted"):
    """A request was taken on; its images lie beside the journal."""

    request: RequestId
    output: str
    """``video`` or ``image``."""
    params: dict[str, Any]
    metadata: dict[str, str]
    images: int = 0
    queue_timeout: float
    run_timeout: float
    created_at: float
    """Unix seconds."""
    key: str = ""
    """Digest of the client's idempotency key; empty when it gave none."""
    digest: str = ""
    """Digest of what the client asked for under that key."""


class FileNote(Record, frozen=True, kw_only=True):
    """A stored media file, without its place: the store may have been moved."""

    name: str
    mime: str
    suffix: str
    nbytes: int
    width: int
    height: int
    frames: int
    fps: float


class Stored(Record, frozen=True, kw_only=True, tag="stored"):
    """The files of a request are kept: it is done, whatever happens to the server now."""

    request: RequestId
    files: tuple[FileNote, ...]
    stored_at: float
    """Unix seconds."""


class Finish(Record, frozen=True, kw_only=True, tag="ended"):
    """A request reached its final state. Times are Unix seconds."""

    view: JobView
    started_at: float | None
    completed_at: float


class Saved(Record, frozen=True, kw_only=True, tag="saved"):
    """The files of a request that is done lie at the path that its client asked for."""

    request: RequestId


class Paused(Record, frozen=True, kw_only=True, tag="paused"):
    """A client has a request wait, or lets it go on."""

    request: RequestId
    paused: bool


class Deleting(Record, frozen=True, kw_only=True, tag="deleting"):
    """A request is to be forgotten: its media go first, then its rows."""

    request: RequestId


JournalEntry: TypeAlias = Accepted | LeaseGranted | StageDone | Clocks | Paused | Stored | Finish | Saved | Deleting

ENDED_SLOT = 2
TRANSIENT_SLOT = 10
"""Slots from here on are of no use any more when a request has ended."""


def request_of(entry: JournalEntry) -> RequestId:
    """The request that an entry speaks of."""
    match entry:
        case LeaseGranted() | StageDone():
            return entry.lease.request
        case Finish():
            return entry.view.request
        case Accepted() | Clocks() | Paused() | Stored() | Saved() | Deleting():
            return entry.request


def slot_of(entry: JournalEntry) -> int:
    """The place of an entry among those of its request; a later entry for the same place takes it over."""
    match entry:
        case Accepted():
            return 0
        case Stored():
            return 1
        case Finish():
            return ENDED_SLOT
        case Deleting():
            return 3
        case Saved():
            return 4
        case LeaseGranted():
            return TRANSIENT_SLOT
        case StageDone():
            return _stage_slot(entry.lease.role)
        case Paused():
            return _PAUSED_SLOT
        case Clocks():
            return _CLOCKS_SLOT


def displaced_by(entry: JournalEntry) -> int | None:
    """Another place whose entry means nothing any more: a stage that is leased again is not done."""
    if isinstance(entry, LeaseGranted) and entry.lease.attempt > 1:
        return _stage_slot(entry.lease.role)
    return None


def _stage_slot(role: Role) -> int:
    return TRANSIENT_SLOT + 1 + ROLES.index(role)


_PAUSED_SLOT = TRANSIENT_SLOT + 1 + len(ROLES)
_CLOCKS_SLOT = _PAUSED_SLOT + 1

SLOTS = range(_CLOCKS_SLOT + 1)
"""Every slot there may be."""


class History:
    """What the journal knows of one request; `add` takes its entries in the order in which they were written."""

    def __init__(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.lease: LeaseGranted | None = None
        self.stages: dict[Role, StageDone] = {}
        self.stored: Stored | None = None
        self.finish: Finish | None = None
        self.saved = False
        self.paused = False
        self.deleting = False
        self._attempt = 1
        self._clocks = (0.0, 0.0)

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry."""
        match entry:
            case Accepted():
                self.accepted = entry
            case LeaseGranted():
                # A stage that is leased is not done, whatever it had made before.
                self.stages.pop(entry.lease.role, None)
                self.lease = entry
                self._at(entry)
            case StageDone():
                self.stages[entry.lease.role] = entry
                if self.lease is not None and self.lease.lease == entry.lease:
                    self.lease = None
                self._at(entry)
            case Clocks():
                self._tell_time(entry)
            case Paused(paused=paused):
                self.paused = paused
            case Stored():
                self.stored = entry
            case Finish():
                self.finish = entry
            case Saved():
                self.saved = True
            case Deleting():
                self.deleting = True

    def _at(self, entry: LeaseGranted | StageDone) -> None:
        self._attempt = max(self._attempt, entry.lease.attempt)
        self._tell_time(entry)

    def _tell_time(self, entry: LeaseGranted | StageDone | Clocks) -> None:
        self._clocks = (entry.waited, entry.ran)

    @property
    def live(self) -> bool:
        """Whether the request has yet to be brought to its end."""
        return not (self.finish or self.stored or self.deleting)

    def restore(self) -> Restore:
        """The event that puts a live request back into a router."""
        accepted, lease = self.accepted, self.lease
        waited, ran = self._clocks
        return Restore(
            request=accepted.request,
            params=accepted.params,
            queue_timeout=accepted.queue_timeout,
            run_timeout=accepted.run_timeout,
            attempt=self._attempt,
            waited=waited,
            ran=ran,
            holder=None if lease is None else lease.instance,
            done=self._done(),
            timings=self._timings(),
        )

    def ended(self) -> Finish:
        """How a request that is not live ended; one whose files are stored is done."""
        if self.finish is not None:
            return self.finish
        waited, ran = self._clocks
        view = JobView(
            request=self.accepted.request,
            state=JobState.DONE if self.stored is not None else JobState.CANCELLED,
            attempt=self._attempt,
            step=0,
            steps=0,
            position=None,
            waiting_seconds=waited,
            running_seconds=ran,
            error=None,
            timings=self._timings(),
        )
        at = self.accepted.created_at if self.stored is None else self.stored.stored_at
        return Finish(view=view, started_at=None, completed_at=at)

    def _done(self) -> tuple[StageDone, ...]:
        return tuple(self.stages[role] for role in ROLES if role in self.stages)

    def _timings(self) -> tuple[StageTiming, ...]:
        return tuple(stage.timing for stage in self._done())


def replay(entries: Iterable[JournalEntry]) -> dict[RequestId, History]:
    """Histories in order of acceptance, from entries in the order in which they were written.

    Entries of requests that were never accepted, or are forgotten, count for nothing.
    """
    histories: dict[RequestId, History] = {}
    for entry in entries:
        request = request_of(entry)
        if (history := histories.get(request)) is not None:
            history.add(entry)
        elif isinstance(entry, Accepted):
            histories[request] = History(entry)
    return histories
