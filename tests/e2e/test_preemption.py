"""Requests that lose their denoiser, are paused, or have it restarted under them, go on from the step they reached."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.clients import SEEDS, SHORT, Clients
from tests.e2e.harness import Deployment, instances_of, until

LONG: dict[str, Any] = {"num_inference_steps": 60, "size": "128x128", "num_frames": 9, "seed": 5}


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One encoder, two denoisers that make checkpoints five times a second, one decoder."""
    with Deployment(tmp_path_factory.mktemp("saving")) as deployment:
        deployment.start_server()
        for name in ("encoder-0", "denoiser-0", "denoiser-1", "decoder-0"):
            start(deployment, name)
        deployment.wait_ready()
        yield deployment


def start(deployment: Deployment, name: str) -> None:
    deployment.start(name, "--checkpoint-interval", "0.2", "--drain-timeout", "2")


@pytest.fixture(scope="module")
def expected(saving: Deployment) -> bytes:
    """What the request makes when nobody disturbs it."""
    return saving.api.make(**LONG)


def denoiser_of(deployment: Deployment, job: str, step: int) -> str:
    """Wait until the job has done so many steps; the name of the denoiser that it runs on."""

    def look() -> str | None:
        video = deployment.api.job(job)
        assert video["status"] != "failed", video["error"]
        if video["stage"] != "denoising_running" or video["step"] < step:
            return None
        names = {instance: name for name, instance in deployment.registered().items()}
        busy = [i["instance"] for i in deployment.api.info()["instances"] if "denoiser" in i["roles"] and i["leases"]]
        return names[busy[0]] if busy else None

    return until(look, f"step {step} of {job}")


def test_a_killed_denoiser_costs_only_the_steps_since_its_last_checkpoint(saving: Deployment, expected: bytes) -> None:
    job = saving.api.submit(**LONG)
    victim = denoiser_of(saving, job, 15)
    saving.instances[victim].kill()
    video = saving.api.done(job)
    assert video["resumed_from_step"] > 0
    assert video["attempt"] == 2
    assert saving.api.content(job) == expected
    start(saving, victim)
    saving.wait_ready()


def test_a_paused_request_stands_still_and_goes_on_where_it_was(saving: Deployment, expected: bytes) -> None:
    job = saving.api.submit(**LONG)
    denoiser_of(saving, job, 5)
    saving.api.post(f"/v1/videos/{job}/pause", {}).raise_for_status()
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
    here = saving.registered()[denoiser_of(saving, job, 5)]
    saving.api.post(f"/v1/videos/{job}/migrate", {}).raise_for_status()
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
    leaver = denoiser_of(saving, lengthy[0], 5)
    (other,) = {"denoiser-0", "denoiser-1"} - {leaver}
    with Clients(saving.api) as clients:
        for name in (leaver, other, "encoder-0", "decoder-0"):
            process = saving.instances[name]
            process.signal(signal.SIGTERM)
            assert process.end(10) == 0, process.output()[-3000:]
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
