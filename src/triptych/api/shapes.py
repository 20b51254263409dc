"""What the endpoints answer with, as the OpenAI SDK's types require it, plus fields of ours that collide with none."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """Refuses fields that are not declared, so that the OpenAPI document is the whole truth."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ErrorObject(Shape):
    """What went wrong; ``param`` is the client's own name for the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Shape):
    """Body of every error."""

    error: ErrorObject


class JobError(Shape):
    """Why a job failed."""

    code: str
    message: str


class Timing(Shape):
    """One finished stage of a job; all durations in seconds."""

    role: str
    instance: str
    attempt: int
    waiting: float
    pulling: float
    pulled_bytes: int
    plane: str
    running: float
    compute: float
    staging: float


class Video(Shape):
    """A video job. The first block is OpenAI's, the second ours."""

    id: str
    object: Literal["video"] = "video"
    created_at: int
    completed_at: int | None
    expires_at: int | None
    error: JobError | None
    model: str
    progress: int
    prompt: str | None
    remixed_from_video_id: str | None
    seconds: str
    size: str
    status: Literal["queued", "in_progress", "completed", "failed"]

    started_at: int | None
    stage: str
    """The job's state in the words of the request life, e.g. ``denoising_running``."""
    step: int
    steps: int
    attempt: int
    resumed_from_step: int
    """Steps that the latest denoising attempt took over from an interrupted one; 0: it began anew."""
    paused: bool
    position: int | None
    """Place in the queue, from 0, while waiting for an instance."""
    waiting_seconds: float
    running_seconds: float
    num_frames: int | None
    fps: float | None
    seed: int | None
    n: int
    """Videos that the job makes; ``content`` takes which by ``index``."""
    timings: list[Timing]


class VideoList(Shape):
    """One page of video jobs."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(Shape):
    """Confirmation of a deletion."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class JobEvent(Shape):
    """Data of one server-sent event about a job."""

    id: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    stage: str
    progress: int
    step: int
    steps: int
    attempt: int
    position: int | None
    """Place in the queue, from 0, while waiting for an instance."""
    starts_in_seconds: float | None
    """Until the stage that it waits for, as far as past jobs tell; null when nothing is known."""
    eta_seconds: float | None
    """Until the end, waiting for later stages left out; null when nothing is known."""
    error: JobError | None
    preview: str | None = None
    """A small picture of the result so far as a data URL, when there is a new one; see the parameter of that name."""


class ImageData(Shape):
    """One image: either its address on this server or its bytes."""

    url: str | None
    b64_json: str | None
    revised_prompt: str | None

    seed: int | None
    """Of the job that made it. Where one job made several images, they are made again together."""


class Images(Shape):
    """The images of one request."""

    created: int
    data: list[ImageData]
    output_format: Literal["png", "jpeg", "webp"]
    size: str

    seed: int | None
    """Of the first image."""
    timings: list[list[Timing]]
    """One list for each job that made them."""


class ServedModel(Shape):
    """A model that requests may name, and what it accepts."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    aliases: list[str]
    pipeline: str
    task: str
    output: Literal["video", "image"]
    parameters: list[dict[str, Any]]


class ModelList(Shape):
    """All models of the server."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


class Health(Shape):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(Shape):
    """Requests are served, with fewer instances than there could be if there are reasons."""

    ready: Literal[True] = True
    reasons: list[str] = []


class NotReadyBody(Shape):
    """Requests would have to wait or be refused, for these reasons."""

    ready: Literal[False] = False
    reasons: list[str]
    error: ErrorObject
