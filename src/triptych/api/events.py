"""A job as it goes, told as server-sent events: its place in the queue, stages, steps, and its end.

A stream holds no history. It wakes when the job changes and then tells the latest state, so a reader that is slower
than the job misses states in between and costs no memory. It ends with the job, with the server, or with its reader.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.api.shapes import JobError, JobEvent
from triptych.api.views import error_of, progress_of, status_of, step_of
from triptych.core.events import JobState
from triptych.core.forecast import Outlook
from triptych.core.states import COUNTS_AS_RUNNING
from triptych.errors import NotFound, NotReady
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService

REFRESH_SECONDS: Final = 1.0
"""How often places in the queue and the server's stopping are looked at while nothing changes."""
KEEP_ALIVE_SECONDS: Final = 15.0
"""Longest silence of a stream; a comment ends it."""
EVENTS_RESPONSE: Final[dict[str, Any]] = {
    "description": "Events queued, stage, step, then done or failed; the data of each is a JobEvent.",
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "required": ["event", "data"],
                "properties": {
                    "event": {"type": "string", "enum": ["queued", "stage", "step", "done", "failed"]},
                    "data": {"type": "string", "description": "A job as JSON: id, status, stage, progress, step, ..."},
                },
            }
        }
    },
}
"""What the OpenAPI document says of a stream."""
KEEP_ALIVE: Final = b": keep-alive\n\n"


class Progress:
    """What one reader has been told."""

    def __init__(self, service: DiffusionService, name: str) -> None:
        self._name = name
        self._service = service
        self._told: tuple[JobState, int, int | None, int, bytes] | None = None

    def event(self, record: JobRecord) -> bytes | None:
        """The event that tells what is new in ``record``; None when nothing is."""
        view = record.view
        told = (view.state, view.step, view.position, view.attempt, view.preview)
        if told == self._told:
            return None
        before, self._told = self._told, told
        stepped = before is not None and before[0] is view.state
        body = self._body(record, self._service.outlook(record.id))
        if view.preview and (before is None or before[4] != view.preview):
            body = body.model_copy(update={"preview": _data_url(view.preview)})
        return frame(_name(record, stepped), body)

    def deleted(self, record: JobRecord) -> bytes:
        """The last event of a job that was deleted while it was followed."""
        gone = JobError(code="cancelled", message="the job was deleted")
        return frame("failed", self._body(record, Outlook()).model_copy(update={"status": "failed", "error": gone}))

    def _body(self, record: JobRecord, outlook: Outlook) -> JobEvent:
        view = record.view
        step, steps = step_of(record)
        return JobEvent(
            id=self._name,
            status=status_of(record),
            stage=view.state.value,
            progress=progress_of(view),
            step=step,
            steps=steps,
            attempt=view.attempt,
            position=view.position,
            starts_in_seconds=outlook.starts_in,
            eta_seconds=0.0 if record.ended else outlook.ends_in,
            error=error_of(view),
        )


def _data_url(picture: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(picture).decode()}"


def _name(record: JobRecord, stepped: bool) -> str:
    state = record.view.state
    if state is JobState.DONE:
        return "done"
    if record.ended:
        return "failed"
    if state not in COUNTS_AS_RUNNING:
        return "queued"
    return "step" if stepped else "stage"


def frame(name: str, body: JobEvent) -> bytes:
    """One event on the wire."""
    return f"event: {name}\ndata: {body.model_dump_json()}\n\n".encode()


class Events:
    """Makes the streams; ``stopping`` says that the server is about to end."""

    def __init__(self, service: DiffusionService, stopping: Callable[[], bool]) -> None:
        self._service = service
        self.stopping = stopping

    def respond(self, record: JobRecord, name: str) -> EventStream:
        """The stream of one job as a response; its events call the job ``name``."""
        return EventStream(self.follow(record, name))

    async def follow(self, record: JobRecord, name: str) -> AsyncGenerator[bytes]:
        """Events of a job until its end or its deletion."""
        progress = Progress(self._service, name)
        source = self._service.watch(record.id)
        changed = asyncio.ensure_future(anext(source, None))
        spoken = time.monotonic()
        try:
            while not self.stopping():
                await asyncio.wait((changed,), timeout=REFRESH_SECONDS)
                if changed.done():
                    changed.result()
                    changed = asyncio.ensure_future(anext(source, None))
                record = self._service.get(record.id)  # as it is now: the reader may have been slow
                event = progress.event(record)
                if event is not None or time.monotonic() - spoken >= KEEP_ALIVE_SECONDS:
                    spoken = time.monotonic()
                    yield event or KEEP_ALIVE
                if record.ended:
                    return
        except NotFound:
            yield progress.deleted(record)
        except NotReady:  # the server stops
            return
        finally:
            changed.cancel()
            await asyncio.gather(changed, return_exceptions=True)


class EventStream(Response):
    """A response that sends frames as they come and closes their generator when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the frames end or the client does."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
        if not pump.cancelled():
            pump.result()

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
