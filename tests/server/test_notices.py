"""The log of what the router counts: complete while it is calm, bounded and in one line whatever peers send."""

from __future__ import annotations

import logging

import pytest

from triptych.core.events import Count, JobState, JobView
from triptych.ids import InstanceId, RequestId
from triptych.server.notices import CAUSE, IN_FULL, PERIOD, Notices
from triptych.wire.messages import ErrorInfo


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def notices(clock: Clock, caplog: pytest.LogCaptureFixture) -> Notices:
    caplog.set_level(logging.INFO)
    return Notices(clock)


def stale(detail: str = "Progress", instance: str = "denoiser-0") -> Count:
    return Count(name="stale_message", detail=detail, instance=InstanceId(instance), request=None)


def test_few_are_told_in_full(notices: Notices, caplog: pytest.LogCaptureFixture) -> None:
    notices.add(stale())
    assert caplog.messages == ["stale_message: Progress (instance denoiser-0, request None)"]


def test_a_flood_becomes_its_number_and_hides_nothing_else(
    notices: Notices, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5000):
        notices.add(stale())
    notices.add(Count(name="instance_lost", detail="silent", instance=InstanceId("d"), request=None))
    assert len(caplog.messages) == IN_FULL + 1
    assert "instance_lost" in caplog.messages[-1]
    clock.now = PERIOD
    notices.flush()
    assert caplog.messages[-1] == f"stale_message: {5000 - IN_FULL} more in the last 10 s"
    notices.add(stale())
    assert len(caplog.messages) == IN_FULL + 3


def test_names_of_peers_cannot_forge_a_line(notices: Notices, caplog: pytest.LogCaptureFixture) -> None:
    notices.add(stale(instance="x\n2026-01-01 INFO all is well\x1b[2J"))
    notices.add(stale(detail="a" * 100_000))
    assert "x\\n2026" in caplog.messages[0]
    assert all(message.isprintable() and len(message) < 600 for message in caplog.messages)


def view(state: JobState, error: ErrorInfo | None = None) -> JobView:
    return JobView(
        request=RequestId("video_1"), state=state, attempt=2, step=0, steps=0, position=None, waiting_seconds=1.25,
        running_seconds=60.0, error=error, timings=(),
    )  # fmt: skip


def test_the_log_says_what_became_of_a_job_and_which_call_began_it(
    notices: Notices, caplog: pytest.LogCaptureFixture
) -> None:
    token = CAUSE.set("req_7")
    notices.accepted(RequestId("video_1"))
    CAUSE.reset(token)
    notices.accepted(RequestId("video_2"))
    notices.ended(view(JobState.DONE))
    late = ErrorInfo(code="queue_timeout", message="waited\n too long", blame="client")
    notices.ended(view(JobState.TIMED_OUT, late))
    assert caplog.messages == [
        "accepted: request video_1 by HTTP request req_7",
        "accepted: request video_2",
        "done: request video_1 after 1.2 s of waiting and 60.0 s of running, attempt 2",
        "timed_out: request video_1 after 1.2 s of waiting and 60.0 s of running, attempt 2, code queue_timeout: "
        "waited\\n too long",
    ]
