"""A real instance of two processes: its requests, its death with either of them, and its life after that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.worker.test_process import WAIT, Desk, Instance
from triptych.core.events import CancelRequest, JobState
from triptych.ids import ROLES, Role
from triptych.wire.messages import Goodbye, Progress, Stopped
from triptych.worker.ranks.leader import COLLECTIVE_SECONDS


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.control.close()


def follower(instance: Instance) -> psutil.Process:
    (only,) = psutil.Process(instance.process.pid).children()
    return only


def test_an_instance_dies_with_any_of_its_ranks_and_its_work_is_done_by_the_next(desk: Desk, tmp_path: Path) -> None:
    first = Instance(desk, *ROLES, log=tmp_path / "first", transfer="local", gpu_ids=(0, 1))
    second: Instance | None = None
    try:
        assert desk.result(desk.submit("done", num_inference_steps=2)).state is JobState.DONE
        (view,) = desk.router.instances()
        assert view.sharing == "2 GPUs: cfg 2 with guidance, ulysses 2 without"
        cancelled = desk.submit("cancelled", num_inference_steps=100)
        desk.until(lambda: bool(desk.said(Progress, cancelled, Role.DENOISER)))
        desk.feed(CancelRequest(request=cancelled))
        desk.until(lambda: bool(desk.said(Stopped, cancelled, Role.DENOISER)))

        survivor = desk.submit("survivor", num_inference_steps=100)
        desk.until(lambda: bool(desk.said(Progress, survivor, Role.DENOISER)))
        follower(first).kill()
        assert first.process.wait(WAIT) == 1
        assert "rank 1 is lost" in first.log.read_text()

        second = Instance(desk, *ROLES, log=tmp_path / "second", transfer="local", gpu_ids=(0, 1))
        assert desk.result(survivor).state is JobState.DONE
        desk.submit("left", num_inference_steps=100)
        orphan = follower(second)
        second.process.send_signal(signal.SIGKILL)
        orphan.wait(WAIT)
    finally:
        first.end()
        if second is not None:
            second.end()


def test_an_instance_ends_when_one_of_its_ranks_is_frozen(desk: Desk, tmp_path: Path) -> None:
    instance = Instance(desk, *ROLES, log=tmp_path / "log", transfer="local", gpu_ids=(0, 1))
    try:
        request = desk.submit("frozen", num_inference_steps=100)
        desk.until(lambda: bool(desk.said(Progress, request, Role.DENOISER)))
        frozen = follower(instance)
        frozen.suspend()
        # Far less than the bound of a collective, and far more than it takes.
        assert instance.process.wait(COLLECTIVE_SECONDS / 3) == 1
        assert "rank 1 is lost: its process is stopped" in instance.log.read_text()
        frozen.wait(WAIT)
        desk.until(lambda: any(isinstance(m, Goodbye) and m.failed for m in desk.heard))
    finally:
        instance.end()
