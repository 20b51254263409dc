"""What the progress bar says."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.cli.progress import describe, detail
from triptych.client import Progress
from triptych.core.events import JobState


def progress(**fields: Any) -> Progress:
    values: dict[str, Any] = {
        "job_id": "video_1",
        "stage": "denoising_running",
        "step": 3,
        "steps": 20,
        "percent": 17,
        "position": None,
        "attempt": 1,
        "elapsed_seconds": 1.0,
        "eta_seconds": None,
    }
    return Progress(**values | fields)


def test_steps_and_remaining_time_are_shown_while_denoising() -> None:
    assert describe(progress()) == "denoising"
    assert detail(progress()) == "step 3 of 20"
    assert detail(progress(eta_seconds=12.4)) == "step 3 of 20, about 12 s left"


def test_the_place_in_the_queue_is_shown_while_waiting() -> None:
    waiting = progress(stage="encoder_waiting", position=4, steps=0, step=0)
    assert describe(waiting) == "waiting for an encoder, 4 before it"
    assert detail(waiting) == ""


def test_another_attempt_is_named() -> None:
    assert describe(progress(attempt=2)) == "denoising (attempt 2)"


@pytest.mark.parametrize("state", [s for s in JobState if s not in ("failed", "timed_out", "cancelled")])
def test_every_state_on_the_way_has_plain_words(state: JobState) -> None:
    assert "_" not in describe(progress(stage=state.value))
