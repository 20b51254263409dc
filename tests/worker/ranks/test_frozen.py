"""A process that is stopped is told from one that is only busy, and from one that was stopped for a moment."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from triptych.worker.ranks import frozen
from triptych.worker.ranks.frozen import FrozenWatch

WAIT = 60.0
BUSY = "import sys; print(flush=True); sum(range(10 ** 12))"  # holds the interpreter lock throughout


@pytest.fixture
def busy() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def ignore(rank: int, reason: str) -> None:
    """Nobody is told."""


def looks(watch: FrozenWatch, number: int) -> list[int | None]:
    return [watch.look() for _ in range(number)]


def stop(process: psutil.Process) -> None:
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass


def test_only_one_that_stays_stopped_is_lost(busy: psutil.Process) -> None:
    watch = FrozenWatch({3: busy.pid}, ignore)
    assert looks(watch, 20) == [None] * 20
    for _ in range(2):
        stop(busy)
        assert looks(watch, 3) == [None] * 3
        busy.resume()
        while busy.status() == psutil.STATUS_STOPPED:
            pass
        assert looks(watch, 1) == [None]
    stop(busy)
    assert looks(watch, 4) == [None, None, None, 3]


def test_one_that_has_ended_is_not_its_affair(busy: psutil.Process) -> None:
    watch = FrozenWatch({1: busy.pid}, ignore)
    busy.kill()
    assert looks(watch, 9) == [None] * 9


def test_whoever_asked_is_told_once_and_the_watch_is_over(
    busy: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "LOOK_SECONDS", 0.01)
    told: list[tuple[int, str]] = []
    watch = FrozenWatch({2: busy.pid}, lambda rank, reason: told.append((rank, reason)))
    stop(busy)
    watch.run()
    assert told == [(2, "its process is stopped")]


def test_a_watch_that_is_closed_ends(busy: psutil.Process) -> None:
    watch = FrozenWatch({1: busy.pid}, ignore)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    watch.close()
    thread.join(WAIT)
    assert not thread.is_alive()
