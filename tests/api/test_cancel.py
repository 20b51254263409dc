"""Stopping work over HTTP, in whatever state it is: by DELETE, and by hanging up while one waits for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.api.slow import dial
from triptych.ids import ROLES

HOLDS = [f"hold {role}" for role in ROLES]
"""Prompts whose request stays in a stage: encoding, denoising, decoding."""


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def at_rest(house: Any) -> bool:
    """Whether no instance holds a lease or a copy, and nothing waits."""
    info = house.service.info()
    idle = all(not instance["leases"] and not instance["copies"] for instance in info["instances"])
    return idle and all(role["queue_depth"] == 0 for role in info["roles"].values())


@pytest.fixture
def http(house: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url, timeout=60) as client:
        yield client
    until(lambda: at_rest(house))
    house.held.clear()


@pytest.fixture
def crowd(http: httpx.Client, house: Any) -> Iterator[None]:
    """Every slot of the denoiser is taken."""
    jobs = [http.post("/v1/videos", json={"prompt": "slow"}).json()["id"] for _ in range(4)]
    until(lambda: len(house.held) == 4)
    yield
    for job in jobs:
        http.delete(f"/v1/videos/{job}")


@pytest.mark.parametrize("prompt", HOLDS)
def test_delete_stops_a_job_in_every_stage_and_may_be_repeated(http: httpx.Client, house: Any, prompt: str) -> None:
    job = http.post("/v1/videos", json={"prompt": prompt}).json()["id"]
    until(lambda: house.held)
    assert http.delete(f"/v1/videos/{job}").status_code == 200
    assert http.delete(f"/v1/videos/{job}").status_code == 404
    until(lambda: at_rest(house))


@pytest.mark.parametrize("prompt", HOLDS)
def test_a_task_that_was_stopped_stays_stopped(http: httpx.Client, house: Any, prompt: str) -> None:
    task = http.post("/v1/tasks/video/", json={"prompt": prompt}).json()["task_id"]
    until(lambda: house.held)
    stops = [http.delete(f"/v1/tasks/{task}").json()["stop_status"] for _ in range(2)]
    assert stops == ["success", "do_nothing"]
    assert http.get(f"/v1/tasks/{task}/status").json()["status"] == "cancelled"
    until(lambda: at_rest(house))


@pytest.mark.usefixtures("crowd")
def test_delete_takes_a_waiting_job_out_of_its_queue(http: httpx.Client, house: Any) -> None:
    job = http.post("/v1/videos", json={"prompt": "a cat"}).json()["id"]
    until(lambda: house.service.info()["roles"]["denoiser"]["queue_depth"] == 1)
    http.delete(f"/v1/videos/{job}")
    assert house.service.info()["roles"]["denoiser"]["queue_depth"] == 0


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/tasks/image/sync"])
@pytest.mark.parametrize("prompt", HOLDS)
@pytest.mark.usefixtures("http")
def test_hanging_up_stops_the_work_in_every_stage(house: Any, prompt: str, path: str) -> None:
    with dial(house.config.port, path, {"prompt": prompt}):
        until(lambda: house.held)
    until(lambda: at_rest(house))
    assert not house.service.live()


@pytest.mark.usefixtures("crowd")
def test_hanging_up_takes_what_waits_out_of_its_queue(house: Any) -> None:
    with dial(house.config.port, "/v1/images/generations", {"prompt": "a cat"}):
        until(lambda: house.service.info()["roles"]["denoiser"]["queue_depth"] == 1)
    until(lambda: house.service.info()["roles"]["denoiser"]["queue_depth"] == 0)
    until(lambda: len(house.service.live()) == 4)
