"""How an order becomes a job: what is checked, what is written down, and the entry that is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from triptych.core.events import JobState, JobView
from triptych.core.journal import Accepted, FileNote
from triptych.errors import BadRequest
from triptych.ids import RequestId
from triptych.server.archive import Remembered
from triptych.server.media_store import MediaStore
from triptych.server.records import Entry, OutputKind, StoredFile
from triptych.wire.messages import ErrorInfo, replace


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks for, and until when. Times are in seconds."""

    output: OutputKind
    params: dict[str, Any]
    metadata: dict[str, str]
    images: tuple[bytes, ...]
    queue_timeout: float
    run_timeout: float

    def check_images(self) -> None:
        """Raise `BadRequest` for a parameter that names an image which is not there."""
        for name, value in self.params.items():
            for item in cast("list[Any]", value) if isinstance(value, list) else (value,):
                if isinstance(item, dict):
                    index = cast("dict[str, Any]", item).get("blob", -1)
                    if not 0 <= index < len(self.images):
                        raise BadRequest(name, f"{name}={item!r}: must name one of {len(self.images)} images")


def entry_of(accepted: Accepted) -> Entry:
    """The entry of a job that was just accepted."""
    return Entry(
        accepted.request,
        cast("OutputKind", accepted.output),
        accepted.params,
        accepted.metadata,
        _pending(accepted.request),
        created_at=accepted.created_at,
        key=accepted.key,
        images=accepted.images,
    )


def revive(job: Remembered, media: MediaStore) -> Entry:
    """The entry of a job of an earlier life as it was at its last word; one whose images are lost has failed."""
    history = job.history
    entry = entry_of(history.accepted)
    if history.live:
        restore = history.restore()
        entry.timings_seen = len(restore.timings)
        if restore.timings:
            entry.started_at = entry.created_at + restore.timings[0].waiting
        if job.lost:
            error = ErrorInfo(code="images_lost", message=job.lost, blame="operator")
            entry.view = replace(entry.view, state=JobState.FAILED, error=error)
            entry.completed_at = entry.created_at
        return entry
    finish = history.ended()
    entry.view = finish.view
    entry.timings_seen = len(finish.view.timings)
    entry.started_at, entry.completed_at = finish.started_at, finish.completed_at
    if history.stored is not None:
        entry.files = tuple(_file(note, media) for note in history.stored.files)
    if history.saved:
        entry.saved = ""
    return entry


def note_of(file: StoredFile) -> FileNote:
    """What the journal remembers of a stored file."""
    return FileNote(**{name: getattr(file, name) for name in FileNote.__struct_fields__})


def _file(note: FileNote, media: MediaStore) -> StoredFile:
    fields = {name: getattr(note, name) for name in FileNote.__struct_fields__}
    return media.place(StoredFile(path=Path(note.name), **fields))


def _pending(request: RequestId) -> JobView:
    return JobView(
        request=request,
        state=JobState.PENDING,
        attempt=1,
        step=0,
        steps=0,
        position=None,
        waiting_seconds=0.0,
        running_seconds=0.0,
        error=None,
        timings=(),
    )
