"""What the threads have in common: nothing that happens to one of them stays unheard."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

import pytest
import torch

from triptych.core.instance_events import Stop
from triptych.errors import TransferError
from triptych.worker.jobs import Post, ThreadDied
from triptych.worker.threads import Mailbox, WorkerThread

WAIT = 60.0


class Divider(WorkerThread[float]):
    """Divides ten by its jobs."""

    def __init__(self, posts: SimpleQueue[Post], device: str = "cpu") -> None:
        super().__init__("divider", posts.put, device)
        self.results: list[float] = []

    def handle(self, job: float) -> None:
        if job < 0:
            raise TransferError("negative jobs are not for us")
        self.results.append(10 / job)


def test_jobs_are_done_in_order_and_closing_comes_after_them() -> None:
    posts: SimpleQueue[Post] = SimpleQueue()
    thread = Divider(posts)
    for job in (1, 2, 5):
        thread.put(job)
    thread.close()
    thread.start()
    thread.join(WAIT)
    assert thread.results == [10, 5, 2]
    assert posts.empty()


@pytest.mark.parametrize(
    ("job", "reason"), [(0.0, "ZeroDivisionError: float division by zero"), (-1.0, "negative jobs are not for us")]
)
def test_a_death_is_posted_with_its_reason_and_logged(
    job: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    posts: SimpleQueue[Post] = SimpleQueue()
    thread = Divider(posts)
    thread.start()
    with caplog.at_level(logging.CRITICAL):
        thread.put(job)
        assert posts.get(timeout=WAIT) == ThreadDied(thread="divider", reason=reason)
    assert "the divider thread died" in caplog.text
    thread.join(WAIT)


def test_a_thread_is_at_its_own_gpu_whatever_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever only waits for a copy would open the first GPU, and take half a GiB of it."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    thread = Divider(SimpleQueue(), "cuda:3")
    thread.close()
    thread.start()
    thread.join(WAIT)
    assert chosen == [("divider", torch.device("cuda:3"))]


def test_a_post_wakes_whoever_waits() -> None:
    mailbox = Mailbox()
    mailbox.post(Stop(reason="early"))
    woken = threading.Event()
    mailbox.attach(woken.set)
    mailbox.post(Stop(reason="late"))
    assert woken.is_set()
    assert mailbox.take() == [Stop(reason="early"), Stop(reason="late")]
    assert mailbox.take() == []
