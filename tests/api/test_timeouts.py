"""Time limits that a request sets for itself: what they end, what they say, and how far they may go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import asking


@pytest.fixture
def http(house: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url, timeout=60) as client:
        yield client


def ended(http: httpx.Client, job: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (video := http.get(f"/v1/videos/{job}").json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return video


def free_slots(house: Any) -> int:
    return house.service.info()["roles"]["denoiser"]["free_slots"]


def test_a_run_timeout_of_its_own_ends_a_request_in_the_state_that_it_names_and_frees_its_slot(
    http: httpx.Client, house: Any
) -> None:
    job = http.post("/v1/videos", json={"prompt": "slow", "run_timeout": 1.5}).json()["id"]
    error = ended(http, job)["error"]
    assert error["code"] == "run_timeout"
    assert "(limit 1.5 s) in denoising_running" in error["message"]
    deadline = time.monotonic() + 60
    while free_slots(house) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    house.held.clear()


def test_a_queue_timeout_of_its_own_ends_a_request_that_waits(http: httpx.Client, house: Any) -> None:
    jobs = [http.post("/v1/videos", json={"prompt": "slow"}).json()["id"] for _ in range(4)]
    try:
        deadline = time.monotonic() + 60
        while len(house.held) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job = http.post("/v1/videos", json={"prompt": "a cat", "queue_timeout": 1.5}).json()["id"]
        error = ended(http, job)["error"]
        assert error["code"] == "queue_timeout"
        assert "in denoising_waiting" in error["message"]
    finally:
        for running in jobs:
            http.delete(f"/v1/videos/{running}")
        house.held.clear()


def test_who_waits_for_an_image_hears_of_its_timeout(http: httpx.Client, house: Any) -> None:
    answer = http.post("/v1/images/generations", json={"prompt": "slow", "run_timeout": 1.5})
    assert answer.status_code == 504
    assert "denoising_running" in answer.json()["error"]["message"]
    house.held.clear()


def test_the_task_api_and_forms_take_them_too(http: httpx.Client, house: Any) -> None:
    task = http.post("/v1/tasks/video/", json={"prompt": "slow", "run_timeout": 1.5}).json()["task_id"]
    assert "limit 1.5 s" in ended(http, task)["error"]["message"]
    form = http.post("/v1/videos", files={"prompt": (None, "slow"), "run_timeout": (None, "1.5")})
    assert "limit 1.5 s" in ended(http, form.json()["id"])["error"]["message"]
    house.held.clear()


@pytest.mark.parametrize("field", ["run_timeout", "queue_timeout"])
@pytest.mark.parametrize("value", [0, -1, 3601, "soon", True])
def test_what_is_beyond_the_cap_or_no_time_at_all_is_refused(http: httpx.Client, field: str, value: Any) -> None:
    answer = http.post("/v1/videos", json={"prompt": "a cat", field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_the_cap_is_the_operators(make_house: Any) -> None:
    with make_house(timeout_cap=5.0, run_timeout=2.0, queue_timeout=9.0) as house:
        for field, most in (("run_timeout", 5.0), ("queue_timeout", 9.0)):
            assert asking.post(f"{house.url}/v1/videos", json={"prompt": "a", field: most}).status_code == 200
            refused = asking.post(f"{house.url}/v1/videos", json={"prompt": "a", field: most + 1})
            assert f"at most {most:g} seconds" in refused.json()["error"]["message"]
        body = asking.get(f"{house.url}/openapi.json").json()["components"]["schemas"]["VideoForm"]["properties"]
        assert body["run_timeout"]["maximum"] == 5.0
