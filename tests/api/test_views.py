"""A job in the words of the doors: how far it is."""

from __future__ import annotations

from triptych.api.views import progress_of
from triptych.core.events import JobState, JobView
from triptych.ids import RequestId


def view(state: JobState, step: int, steps: int) -> JobView:
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


def test_progress_goes_back_with_what_is_lost() -> None:
    """Steps that nobody kept are computed again."""
    assert progress_of(view(JobState.DENOISING_WAITING, 0, 0)) == 5
