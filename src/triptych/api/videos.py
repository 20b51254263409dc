"""The OpenAI videos API: create, list, look at, download and delete video jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import FastAPI, Query, Request, Response
from pydantic import JsonValue
from starlette.responses import FileResponse

from triptych.api.body import read_body
from triptych.api.errors import NoContent, NotFinished
from triptych.api.files import media_response
from triptych.api.orders import Order, check_handoff, read_order
from triptych.api.ready import need_schema
from triptych.api.routes import STRICT, errors
from triptych.api.shapes import JobError, Timing, Video, VideoDeleted, VideoList
from triptych.core.events import JobState, JobView
from triptych.errors import NotFound
from triptych.ids import RequestId
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService

_ID: dict[str, JsonValue] = {"pattern": "^video_[0-9a-f]{32}$"}

POLL_MILLISECONDS = "500"
"""What unfinished jobs advise OpenAI clients to wait before they look again."""

Status = Literal["queued", "in_progress", "completed", "failed"]

_REACHED: dict[JobState, int] = {
    JobState.PENDING: 0,
    JobState.ENCODER_WAITING: 0,
    JobState.ENCODER_RUNNING: 1,
    JobState.ENCODER_DONE: 5,
    JobState.DENOISING_WAITING: 5,
    JobState.DENOISING_DONE: 90,
    JobState.DECODER_WAITING: 90,
    JobState.DECODER_RUNNING: 92,
    JobState.DONE: 100,
}
"""Per cent done on reaching a state; steps fill the room between 5 and 90."""

_DENOISED = frozenset({JobState.DENOISING_DONE, JobState.DECODER_WAITING, JobState.DECODER_RUNNING, JobState.DONE})


def status_of(record: JobRecord) -> Status:
    """OpenAI's word for the state of a job."""
    match record.view.state:
        case JobState.DONE:
            return "completed"
        case JobState.FAILED | JobState.TIMED_OUT | JobState.CANCELLED:
            return "failed"
        case _:
            return "queued" if record.started_at is None else "in_progress"


def progress_of(view: JobView) -> int:
    """Per cent done, 0 to 100."""
    reached = _REACHED.get(view.state)
    if reached is not None:
        return reached
    return 5 + 85 * view.step // view.steps if view.steps else 0


def error_of(view: JobView) -> JobError | None:
    """Why the job failed; None unless it did."""
    if view.error is not None:
        return JobError(code=view.error.code, message=view.error.message)
    match view.state:
        case JobState.FAILED | JobState.TIMED_OUT | JobState.CANCELLED:
            return JobError(code=view.state.value, message=f"the job ended as {view.state.value}")
        case _:
            return None


def timings_of(view: JobView) -> list[Timing]:
    """The finished stages of a job."""
    return [Timing(**asdict(timing)) for timing in view.timings]


def video_of(record: JobRecord) -> Video:
    """A job as OpenAI's video object."""
    view, params = record.view, record.params
    file = record.files[0] if record.files else None
    steps = view.steps or int(params.get("num_inference_steps", 0))  # the view counts only while they run
    return Video(
        id=record.id,
        created_at=int(record.created_at),
        completed_at=_whole(record.completed_at),
        expires_at=None,
        error=error_of(view),
        model=record.metadata.get("model", ""),
        progress=progress_of(view),
        prompt=params.get("prompt"),
        remixed_from_video_id=None,
        seconds=record.metadata.get("seconds", ""),
        size=f"{file.width}x{file.height}" if file else record.metadata.get("size", ""),
        status=status_of(record),
        started_at=_whole(record.started_at),
        stage=view.state.value,
        step=steps if view.state in _DENOISED else view.step,
        steps=steps,
        attempt=view.attempt,
        position=view.position,
        waiting_seconds=view.waiting_seconds,
        running_seconds=view.running_seconds,
        num_frames=file.frames if file else params.get("num_frames"),
        fps=file.fps if file else params.get("fps"),
        seed=params.get("seed"),
        timings=timings_of(view),
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def metadata_of(order: Order) -> dict[str, str]:
    """What answers about the job need and the pipeline does not."""
    return {"model": order.model, "size": order.size, "seconds": order.seconds}


class Videos:
    """The endpoints under /v1/videos."""

    def __init__(self, service: DiffusionService) -> None:
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, handler, method, summary, statuses in (
            ("/v1/videos", self.create, "POST", "Start a video job", (400, 404, 408, 413, 415, 429, 500, 503, 507)),
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
        content = "/v1/videos/{video_id}/content"
        app.add_api_route(
            content,
            self.content,
            methods=["GET"],
            summary="Download a finished video",
            response_class=FileResponse,
            responses=errors(400, 404, 409, 416, 500),
            dependencies=STRICT,
            tags=["videos"],
        )
        app.add_api_route(content, self.content, methods=["HEAD"], include_in_schema=False, dependencies=STRICT)

    async def create(self, request: Request) -> Video:
        """Start a job; the answer comes at once, the job's end is seen by looking at it."""
        body = await read_body(request)
        schema = need_schema(self._service)
        order = await to_thread.run_sync(read_order, schema, body, "video")
        check_handoff(schema, order.params, self._service.smallest_pool())
        record = await self._service.submit(
            order.params, output="video", images=order.images, metadata=metadata_of(order)
        )
        return video_of(record)

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
        videos = [video_of(record) for record in records]
        return VideoList(
            data=videos,
            first_id=videos[0].id if videos else None,
            last_id=videos[-1].id if videos else None,
            has_more=more,
        )

    async def retrieve(self, video_id: str, response: Response) -> Video:
        """The job as it is now."""
        video = video_of(self._find(video_id))
        if video.status in ("queued", "in_progress"):
            response.headers["openai-poll-after-ms"] = POLL_MILLISECONDS
        return video

    async def delete(self, video_id: str) -> VideoDeleted:
        """Stop the job if it is live, and remove it with its file."""
        record = await self._service.delete(self._find(video_id).id)
        return VideoDeleted(id=record.id)

    async def content(
        self,
        request: Request,
        video_id: str,
        variant: Annotated[Literal["video"], Query(description="Only the video itself is kept.")] = "video",
    ) -> FileResponse:
        """The finished file, whole or in byte ranges."""
        assert variant == "video"
        record = self._find(video_id)
        status = status_of(record)
        if status in ("queued", "in_progress"):
            raise NotFinished("video_id", f"video {record.id} is {status}; its content comes with status completed")
        if not record.files:
            error = error_of(record.view)
            reason = f"it failed: {error.message}" if error else "its job stored no file"
            raise NoContent("video_id", f"video {record.id} has no content: {reason}")
        return await media_response(request, record.files[0], "attachment")

    def _find(self, video_id: str) -> JobRecord:
        record = self._service.get(RequestId(video_id))
        if record.output != "video":
            raise NotFound(f"no video has the id {video_id[:80]!r}")
        return record
