"""The preview thread makes one picture at a time, and a failed one harms nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from triptych.core.instance_events import Stepped
from triptych.ids import RequestId, Role
from triptych.wire.messages import Lease
from triptych.worker.jobs import PreviewJob, Ticket
from triptych.worker.preview import PreviewThread

WAIT = 60.0
LEASE = Lease(RequestId("video_1"), Role.DENOISER, 1)


def job(make: Callable[[], bytes], step: int = 1) -> PreviewJob:
    return PreviewJob(ticket=Ticket(LEASE), step=step, steps=4, make=make)


@pytest.fixture
def posts() -> SimpleQueue[Any]:
    return SimpleQueue()


@pytest.fixture
def thread(posts: SimpleQueue[Any]) -> Any:
    made = PreviewThread(device="cpu", post=posts.put)
    made.start()
    yield made
    made.close()
    made.join(WAIT)
    assert not made.is_alive()


def test_a_picture_is_posted_with_its_step(thread: PreviewThread, posts: SimpleQueue[Any]) -> None:
    thread.put(job(lambda: b"picture", step=2))
    assert posts.get(timeout=WAIT) == Stepped(lease=LEASE, step=2, steps=4, preview=b"picture")


def test_it_says_that_it_is_busy_until_it_is_done(thread: PreviewThread, posts: SimpleQueue[Any]) -> None:
    go = threading.Event()
    thread.put(job(lambda: b"slow" if go.wait(WAIT) else b""))
    assert not thread.idle
    go.set()
    assert posts.get(timeout=WAIT).preview == b"slow"
    assert thread.idle


def test_a_picture_that_cannot_be_made_is_left_out(thread: PreviewThread, posts: SimpleQueue[Any]) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    failed = threading.Event()
    thread.put(job(lambda: (failed.set(), fail())[1]))
    assert failed.wait(WAIT)
    thread.put(job(lambda: b"next"))
    assert posts.get(timeout=WAIT).preview == b"next"
