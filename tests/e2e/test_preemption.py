"""Requests that lose their denoiser, are paused, or have it restarted under them, go on from the step they reached."""

from __future__ import annotations

import base64
import io
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from tests import asking
from tests.e2e.clients import SEEDS, SHORT, Clients
from tests.e2e.harness import Deployment, instances_of, until

INTERVAL = 0.2
"""Seconds between two checkpoints."""
LONG: dict[str, Any] = {"num_inference_steps": 60, "size": "128x128", "num_frames": 9, "seed": 5}


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One encoder, two denoisers that make checkpoints five times a second, one decoder; with previews."""
    with Deployment(tmp_path_factory.mktemp("saving")) as deployment:
        deployment.start_server()
        for name in ("encoder-0", "denoiser-0", "denoiser-1", "decoder-0"):
            start(deployment, name)
        deployment.wait_ready()
        yield deployment


def start(deployment: Deployment, name: str) -> None:
    previews = ("--previews",) if name.startswith("denoiser") else ()
    deployment.start(name, "--checkpoint-interval", str(INTERVAL), "--drain-timeout", "2", *previews)


@pytest.fixture(scope="module")
def expected(saving: Deployment) -> bytes:
    """What the request makes when nobody disturbs it."""
    return saving.api.make(**LONG)


@dataclass(frozen=True, kw_only=True)
class Told:
    """One event of a job as a client got it."""

    at: float
    name: str
    data: dict[str, Any]


def follow(deployment: Deployment, job: str, told: list[Told]) -> None:
    """Put the events of a job into ``told`` as they come, until it ends."""
    url = f"{deployment.api.url}/v1/videos/{job}/events"
    with asking.stream("GET", url, trust_env=False) as answer:
        name = ""
        for line in answer.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                told.append(Told(at=time.monotonic(), name=name, data=json.loads(value)))


def check_progress(told: list[Told], *attempts: list[Told]) -> None:
    """The steps of each attempt go up, with time left, and pictures come meanwhile."""
    for steps in attempts:
        numbers = [one.data["step"] for one in steps]
        assert len(set(numbers)) > 1
        assert numbers == sorted(numbers)
        assert all(one.data["steps"] == LONG["num_inference_steps"] for one in steps)
        assert steps[0].data["eta_seconds"] > 0
    assert told[-1].name == "done"
    assert told[-1].data["eta_seconds"] == 0
    pictures = [one.data["preview"] for one in told if one.data["preview"]]
    with Image.open(io.BytesIO(base64.b64decode(pictures[0].removeprefix("data:image/webp;base64,")))) as picture:
        assert picture.format == "WEBP"
        assert picture.width == picture.height


def test_a_killed_denoiser_costs_only_the_steps_since_its_last_checkpoint(saving: Deployment, expected: bytes) -> None:
    """Who follows the job sees it advance, its pictures, and where it goes on."""
    job = saving.api.submit(**LONG, preview=True)
    told: list[Told] = []
    reader = threading.Thread(target=follow, args=(saving, job, told))
    reader.start()
    victim = saving.catch_denoiser(job, 35)
    saving.instances[victim].kill()
    video = saving.api.done(job)
    reader.join()
    assert video["attempt"] == 2
    assert saving.api.content(job) == expected

    first = [one for one in told if one.name == "step" and one.data["attempt"] == 1]
    again = [one for one in told if one.name == "step" and one.data["attempt"] == 2]
    last, resumed = first[-1], video["resumed_from_step"]
    # An interval, and a second for the checkpoint to be made and to get to its keeper; or half of the way, where a
    # machine is so busy that this takes longer.
    kept = [one.data["step"] for one in first if one.at < last.at - INTERVAL - 1.0]
    assert min(kept[-1] if kept else 0, last.data["step"] // 2) <= resumed
    assert again[0].data["step"] >= resumed

    check_progress(told, first, again)
    start(saving, victim)
    saving.wait_ready()


def test_a_paused_request_stands_still_and_goes_on_where_it_was(saving: Deployment, expected: bytes) -> None:
    job = saving.api.submit(**LONG)
    holder = saving.catch_denoiser(job, 5)
    saving.api.post(f"/v1/videos/{job}/pause", {}).raise_for_status()
    saving.instances[holder].signal(signal.SIGCONT)
    paused = until(lambda: (video := saving.api.job(job))["stage"] == "denoising_waiting" and video, "the pause")
    assert paused["paused"]
    assert paused["step"] >= 5
    assert saving.api.make(**LONG | {"num_inference_steps": 2})  # others pass it by
    still = saving.api.job(job)
    assert (still["step"], still["waiting_seconds"]) == (paused["step"], paused["waiting_seconds"])
    saving.api.post(f"/v1/videos/{job}/resume", {}).raise_for_status()
    video = saving.api.done(job)
    assert video["resumed_from_step"] == paused["step"]
    assert not video["paused"]
    assert saving.api.content(job) == expected


def test_a_moved_request_goes_on_where_it_was_on_the_other_denoiser(saving: Deployment, expected: bytes) -> None:
    job = saving.api.submit(**LONG)
    ids = saving.registered()
    holder = saving.catch_denoiser(job, 5)
    here = ids[holder]
    saving.api.post(f"/v1/videos/{job}/migrate", {}).raise_for_status()
    saving.instances[holder].signal(signal.SIGCONT)
    video = saving.api.done(job)
    (there,) = instances_of(video, "denoiser")
    assert there != here
    assert video["attempt"] == 2
    assert video["resumed_from_step"] >= 5
    assert saving.api.content(job) == expected


def test_restarting_every_process_in_turn_under_load_loses_nothing(saving: Deployment, expected: bytes) -> None:
    """What takes longer than an instance may take to leave is handed over between two steps. Meanwhile requests come,
    and are accepted whoever is away but the server."""
    lengthy = [saving.api.submit(**LONG) for _ in range(2)]
    leaver = saving.catch_denoiser(lengthy[0], 5)
    saving.instances[leaver].signal(signal.SIGCONT)
    (other,) = {"denoiser-0", "denoiser-1"} - {leaver}
    with Clients(saving.api) as clients:
        for name in (leaver, other, "encoder-0", "decoder-0"):
            process = saving.instances[name]
            process.signal(signal.SIGTERM)
            assert process.end(30) == 0, process.output()[-3000:]  # two seconds of its own, and what a machine takes
            clients.submit()
            start(saving, name)
            until(lambda name=name: name in saving.registered(), f"{name} to come back")  # as rollouts do
        videos = [saving.api.done(job, seconds=300) for job in lengthy]
        assert any(video["resumed_from_step"] >= 5 for video in videos)

        assert saving.server is not None
        clients.submit()
        assert saving.server.stop() == 0, saving.server.output()[-3000:]
        saving.start_server()
        saving.wait_ready()
        clients.submit()
    assert [saving.api.content(job) for job in lengthy] == [expected] * 2
    alone = [saving.api.make(**SHORT, seed=seed) for seed in range(SEEDS)]
    for job, seed in clients.accepted:
        saving.api.done(job)
        assert saving.api.content(job) == alone[seed]
