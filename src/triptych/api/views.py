"""A job's record in the words that the doors use: status, per cent, error, timings, the video object."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import asdict

from triptych.api.orders import Order
from triptych.api.shapes import JobError, Timing, Video
from triptych.core.events import JobState, JobView
from triptych.server.records import JobRecord

Status = Literal["queued", "in_progress", "completed", "failed"]

_REACHED: dict[JobState, int] = {
    JobState.PENDING: 0,
    JobState.ENCODER_WAITING: 0,
    JobState.ENCODER_RUNNING: 1,
    JobState.ENCODER_DONE: 5,
    JobState.DENOISING_DONE: 90,
    JobState.DECODER_WAITING: 90,
    JobState.DECODER_RUNNING: 92,
    JobState.DONE: 100,
}
"""Per cent done on reaching a state; steps fill the room between 5 and 90, also those of a job that waits for the rest
of them, because it was paused, preempted or moved."""

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
    """Per cent done, 0 to 100; of a job that ended early as far as it came."""
    reached = _REACHED.get(_furthest(view))
    if reached is not None:
        return reached
    return 5 + (85 * view.step // view.steps if view.steps else 0)


def step_of(record: JobRecord) -> tuple[int, int]:
    """Denoising steps done, and of how many."""
    view = record.view
    steps = view.steps or int(record.params.get("num_inference_steps", 0))  # the view counts only while they run
    return (steps if _furthest(view) in _DENOISED else view.step), steps


def _furthest(view: JobView) -> JobState:
    """The state of a job, or the one in which it ended early."""
    return view.state if view.ended_in is None or view.state is JobState.DONE else view.ended_in


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


def video_of(record: JobRecord, kept_seconds: float | None) -> Video:
    """A job as OpenAI's video object; ``kept_seconds`` is how long ended jobs are kept."""
    view, params = record.view, record.params
    file = record.files[0] if record.files else None
    step, steps = step_of(record)
    return Video(
        id=record.id,
        created_at=int(record.created_at),
        completed_at=_whole(record.completed_at),
        expires_at=_expiry(record, kept_seconds),
        error=error_of(view),
        model=record.metadata.get("model", ""),
        progress=progress_of(view),
        prompt=params.get("prompt"),
        remixed_from_video_id=record.metadata.get("remixed_from"),
        seconds=record.metadata.get("seconds", ""),
        size=f"{file.width}x{file.height}" if file else record.metadata.get("size", ""),
        status=status_of(record),
        started_at=_whole(record.started_at),
        stage=view.state.value,
        step=step,
        steps=steps,
        attempt=view.attempt,
        resumed_from_step=view.resumed_from_step,
        paused=view.paused,
        position=view.position,
        waiting_seconds=view.waiting_seconds,
        running_seconds=view.running_seconds,
        num_frames=file.frames if file else params.get("num_frames"),
        fps=file.fps if file else params.get("fps"),
        seed=params.get("seed"),
        n=params.get("n", 1),
        timings=timings_of(view),
    )


def _expiry(record: JobRecord, kept_seconds: float | None) -> int | None:
    if kept_seconds is None or record.completed_at is None or not record.files:
        return None
    return int(record.completed_at + kept_seconds)


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def metadata_of(order: Order) -> dict[str, str]:
    """What answers about the job need and the pipeline does not."""
    return {"model": order.model, "size": order.size, "seconds": order.seconds}
