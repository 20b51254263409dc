"""The OpenAI videos API: create, remix, list, look at, download and delete video jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request, Response
from pydantic import JsonValue
from starlette.responses import FileResponse

from triptych.api.body import read_body
from triptych.api.context import Context
from triptych.api.derived import MIME, SUFFIX, Derived
from triptych.api.errors import NoContent, NotFinished
from triptych.api.events import EVENTS_RESPONSE, EventStream
from triptych.api.files import media_response
from triptych.api.routes import STRICT, errors
from triptych.api.shapes import Video, VideoDeleted, VideoList
from triptych.api.views import error_of, status_of, video_of
from triptych.errors import NotFound
from triptych.ids import RequestId
from triptych.server.records import JobRecord

_ID: dict[str, JsonValue] = {"pattern": "^video_[0-9a-f]{32}$"}

POLL_MILLISECONDS = "500"
"""What unfinished jobs advise OpenAI clients to wait before they look again."""

CREATE_STATUSES = (400, 404, 408, 409, 413, 415, 429, 500, 503, 507)
"""How the start of a job can end badly."""


class Videos:
    """The endpoints under /v1/videos."""

    def __init__(self, context: Context) -> None:
        self._service = context.service
        self._desk = context.desk
        self._events = context.events
        self._derived = Derived(context.service.fetch)
        self._kept = context.config.retained_seconds

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, handler, method, summary, statuses in (
            ("/v1/videos", self.create, "POST", "Start a video job", CREATE_STATUSES),
            ("/v1/videos/{video_id}/remix", self.remix, "POST", "Make a video once more, changed", CREATE_STATUSES),
            ("/v1/videos/{video_id}/pause", self.pause, "POST", "Have a video job wait", (400, 404, 429, 500, 503)),
            ("/v1/videos/{video_id}/resume", self.resume, "POST", "Let a paused job go on", (400, 404, 429, 500, 503)),
            ("/v1/videos/{video_id}/migrate", self.migrate, "POST", "Move a video job", (400, 404, 409, 500, 503)),
            ("/v1/videos", self.page, "GET", "List video jobs", (400, 500)),
            ("/v1/videos/{video_id}", self.retrieve, "GET", "Look at a video job", (400, 404, 500)),
            ("/v1/videos/{video_id}", self.delete, "DELETE", "Cancel and delete a video job", (400, 404, 500)),
        ):
            app.add_api_route(
                path,
                handler,
                methods=[method],
                summary=summary,
                responses=errors(*statuses),
                dependencies=STRICT,
                tags=["videos"],
            )
        app.add_api_route(
            "/v1/videos/{video_id}/events",
            self.events,
            methods=["GET"],
            summary="Follow a video job as server-sent events",
            response_class=Response,
            responses={200: EVENTS_RESPONSE, **errors(400, 404, 500)},
            dependencies=STRICT,
            tags=["videos"],
        )
        content = "/v1/videos/{video_id}/content"
        app.add_api_route(
            content,
            self.content,
            methods=["GET"],
            summary="Download a finished video, or a picture of it",
            response_class=FileResponse,
            responses=errors(400, 404, 409, 416, 500),
            dependencies=STRICT,
            tags=["videos"],
        )
        app.add_api_route(content, self.content, methods=["HEAD"], include_in_schema=False, dependencies=STRICT)

    async def create(self, request: Request) -> Video:
        """Start a job; the answer comes at once, the job's end is seen by looking at it."""
        order = await self._desk.read(request, await read_body(request), "video")
        return self._shown(await self._desk.submit(request, order, "video"))

    async def remix(self, request: Request, video_id: str) -> Video:
        """Start a job like that of an existing video, its seed included, with the given fields changed."""
        source = self._find(video_id)
        order = await self._desk.remix(request, source, await read_body(request))
        return self._shown(await self._desk.submit(request, order, "video", metadata={"remixed_from": source.id}))

    async def page(
        self,
        after: Annotated[
            str | None, Query(description="Id of the last job of the page before.", json_schema_extra=_ID)
        ] = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Annotated[Literal["asc", "desc"], Query(description="By age; desc: newest first.")] = "desc",
    ) -> VideoList:
        """One page of jobs."""
        cursor = None if after is None else RequestId(after)
        records, more = self._service.page(output="video", after=cursor, limit=limit, order=order)
        videos = [self._shown(record) for record in records]
        return VideoList(
            data=videos,
            first_id=videos[0].id if videos else None,
            last_id=videos[-1].id if videos else None,
            has_more=more,
        )

    async def retrieve(self, video_id: str, response: Response) -> Video:
        """The job as it is now."""
        record = self._find(video_id)
        video = self._shown(record)
        if video.status in ("queued", "in_progress"):
            response.headers["openai-poll-after-ms"] = POLL_MILLISECONDS
        return video

    async def events(self, video_id: str) -> EventStream:
        """The job from now until its end: events queued, stage, step, done and failed."""
        record = self._find(video_id)
        return self._events.respond(record, record.id)

    async def pause(self, video_id: str) -> Video:
        """Stop the job at the next step, or at the end of a stage without steps, until it is resumed.

        429 when as many are paused as may be.
        """
        record = self._find(video_id)
        self._desk.limits.check_pause(record)
        return self._shown(self._service.pause(record.id))

    async def resume(self, video_id: str) -> Video:
        """Let the job go on, from the step that it has reached if it can. Jobs that are not paused stay as they are.

        429 while as many wait or run as may: a paused job holds no place.
        """
        record = self._find(video_id)
        self._desk.limits.check_resume(record)
        return self._shown(self._service.resume(record.id))

    async def migrate(self, video_id: str) -> Video:
        """Have another denoiser go on with the job from the next step on. 409 when none can, or none is at it now."""
        return self._shown(self._service.migrate(self._find(video_id).id))

    async def delete(self, video_id: str) -> VideoDeleted:
        """Stop the job if it is live, and remove it with its file."""
        record = await self._service.delete(self._find(video_id).id)
        return VideoDeleted(id=record.id)

    async def content(
        self,
        request: Request,
        video_id: str,
        variant: Annotated[
            Literal["video", "thumbnail", "spritesheet"],
            Query(description="The MP4 itself, its middle frame as WebP, or a sheet of its frames as JPEG."),
        ] = "video",
        index: Annotated[int, Query(ge=0, description="Which of them, where n of a request was more than 1.")] = 0,
    ) -> Response:
        """The finished file, whole or in byte ranges, or a picture made of it."""
        record = self._find(video_id)
        status = status_of(record)
        if status in ("queued", "in_progress"):
            raise NotFinished("video_id", f"video {record.id} is {status}; its content comes with status completed")
        if not record.files:
            error = error_of(record.view)
            reason = f"it failed: {error.message}" if error else "its job stored no file"
            raise NoContent("video_id", f"video {record.id} has no content: {reason}")
        if index >= len(record.files):
            raise NotFound(f"index={index}: job {record.id} made {len(record.files)}, counted from 0")
        file = record.files[index]
        if variant == "video":
            return await media_response(request, self._service, file, "attachment")
        name = f"{Path(file.name).stem}-{variant}{SUFFIX[variant]}"
        headers = {"content-disposition": f'inline; filename="{name}"', "x-content-type-options": "nosniff"}
        return Response(await self._derived.get(file, variant), media_type=MIME[variant], headers=headers)

    def _shown(self, record: JobRecord) -> Video:
        return video_of(record, self._kept)

    def _find(self, video_id: str) -> JobRecord:
        record = self._service.get(RequestId(video_id))
        if record.output != "video":
            raise NotFound(f"no video has the id {video_id[:80]!r}")
        return record
