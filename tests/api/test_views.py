"""A job in the words of the doors: how far it is."""

from __future__ import annotations

import pytest

from triptych.api.views import progress_of, step_of
from triptych.core.events import JobState, JobView
from triptych.ids import RequestId
from triptych.server.records import JobRecord


def view(state: JobState, step: int, steps: int, ended_in: JobState | None = None) -> JobView:
    return JobView(
        request=RequestId("video_1"),
        state=state,
        attempt=1,
        step=step,
        steps=steps,
        position=None,
        waiting_seconds=0.0,
        running_seconds=0.0,
        error=None,
        timings=(),
        ended_in=ended_in,
    )


def test_progress_does_not_go_back_while_a_job_waits_between_two_steps() -> None:
    life = [
        view(JobState.ENCODER_RUNNING, 0, 0),
        view(JobState.ENCODER_DONE, 0, 0),
        view(JobState.DENOISING_WAITING, 0, 0),
        view(JobState.DENOISING_RUNNING, 10, 40),
        view(JobState.DENOISING_WAITING, 10, 40),
        view(JobState.DENOISING_RUNNING, 10, 40),
        view(JobState.DENOISING_RUNNING, 40, 40),
        view(JobState.DENOISING_DONE, 40, 40),
        view(JobState.DECODER_RUNNING, 40, 40),
        view(JobState.DONE, 40, 40),
    ]
    told = [progress_of(one) for one in life]
    assert told == sorted(told)
    assert told[3:6] == [26, 26, 26]


@pytest.mark.parametrize("end", [JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED])
def test_progress_stays_where_a_job_ended_early(end: JobState) -> None:
    """Symptom: a job at 92 % whose file could not be stored failed at 5 %, with no step done."""
    assert progress_of(view(end, 0, 0, JobState.ENCODER_RUNNING)) == 1
    assert progress_of(view(end, 10, 40, JobState.DENOISING_RUNNING)) == 26
    assert progress_of(view(end, 0, 0, JobState.DECODER_RUNNING)) == 92
    record = JobRecord(
        id=RequestId("video_1"),
        output="video",
        params={"num_inference_steps": 40},
        metadata={},
        view=view(end, 0, 0, JobState.DECODER_RUNNING),
        files=(),
        created_at=0.0,
        started_at=0.0,
        completed_at=1.0,
    )
    assert step_of(record) == (40, 40)


def test_progress_goes_back_with_what_is_lost() -> None:
    """Steps that nobody kept are computed again."""
    assert progress_of(view(JobState.DENOISING_WAITING, 0, 0)) == 5
