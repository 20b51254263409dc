"""The Idempotency-Key header over HTTP: a request that is sent again starts nothing new."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.api.conftest import House
from tests.api.slow import dial

BODY: dict[str, Any] = {"prompt": "a tree"}


@pytest.fixture
def http(house: House) -> httpx.Client:
    return httpx.Client(base_url=house.url, trust_env=False, timeout=60)


def post(http: httpx.Client, key: str, path: str = "/v1/videos", **options: Any) -> httpx.Response:
    return http.post(path, headers={"Idempotency-Key": key}, **({"json": BODY} | options))


def test_the_same_request_again_is_the_same_job_though_its_seed_is_drawn(http: httpx.Client, house: House) -> None:
    with http:
        first, second = post(http, "k1").json(), post(http, "k1").json()
        assert first["id"] == second["id"]
        assert first["seed"] == second["seed"] is not None
        assert post(http, "k2").json()["id"] != first["id"]


def test_another_request_under_the_key_is_409_and_names_the_header(http: httpx.Client) -> None:
    with http:
        post(http, "k3")
        for options in ({"json": BODY | {"seed": 1}}, {"path": "/v1/images/generations"}):
            answer = post(http, "k3", **options)
            assert answer.status_code == 409
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")


def test_uploads_count_as_content(http: httpx.Client, picture: bytes) -> None:
    def upload(data: bytes) -> httpx.Response:
        return http.post(
            "/v1/videos",
            headers={"Idempotency-Key": "k4"},
            data=BODY,
            files={"input_reference": ("p.png", data, "image/png")},
        )

    with http:
        first = upload(picture)
        assert first.status_code == 200, first.text
        assert upload(picture).json()["id"] == first.json()["id"]
        assert upload(picture + b"\0").status_code == 409


def test_several_images_under_one_key_are_several_jobs(http: httpx.Client) -> None:
    body = {"prompt": "a tree", "n": 2, "response_format": "url", "seed": 3}
    with http:
        first = post(http, "k5", "/v1/images/generations", json=body).json()["data"]
        second = post(http, "k5", "/v1/images/generations", json=body).json()["data"]
        assert len({image["url"] for image in first}) == 2
        assert first == second


@pytest.mark.parametrize(
    ("one", "other"), [("order", "order 1"), ("aa" + "x" * 253, "bb" + "x" * 253)], ids=["suffix", "long"]
)
def test_keys_of_several_images_are_not_those_of_others(single_house: House, one: str, other: str) -> None:
    """Symptom: a client got the second image of another one, or a 409 for a key that it had never used."""
    body = {"prompt": "a tree", "n": 2, "response_format": "url", "seed": 3}
    with httpx.Client(base_url=single_house.url, trust_env=False, timeout=60) as http:
        first, second = (
            post(http, key, "/v1/images/generations", json=body | {"seed": seed})
            for key, seed in ((one, 3), (other, 40))
        )
        assert (first.status_code, second.status_code) == (200, 200), second.text
        mine, theirs = ({image["url"] for image in answer.json()["data"]} for answer in (first, second))
        assert not mine & theirs


SYNC = [pytest.param("/v1/images/generations", id="images"), pytest.param("/v1/tasks/image/sync", id="task")]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waiting(house: House) -> int:
    """How many clients wait for the job that is held; 0 while none is."""
    return sum(len(house.service._records.get(lease.request).waiters) for lease in list(house.held))


@pytest.mark.parametrize("path", SYNC)
def test_one_of_two_that_wait_for_the_same_job_may_hang_up(http: httpx.Client, house: House, path: str) -> None:
    key, body = f"shared {path}", {"prompt": "hold encoder", "seed": 1}
    with http, ThreadPoolExecutor(1) as pool:
        stays = pool.submit(post, http, key, path, json=body)
        with dial(house.config.port, path, body, key=key):
            until(lambda: waiting(house) == 2)
        until(lambda: waiting(house) == 1)
        (lease,) = house.held
        house.held.pop(lease).let_go(lease)
        assert stays.result().status_code == 200


@pytest.mark.parametrize("path", SYNC)
def test_the_last_one_that_hangs_up_stops_the_work_and_the_key_is_free(
    http: httpx.Client, house: House, path: str
) -> None:
    key, body = f"left {path}", {"prompt": "hold encoder"}
    with http:
        with dial(house.config.port, path, body, key=key):
            with dial(house.config.port, path, body, key=key):
                until(lambda: waiting(house) == 2)
            until(lambda: waiting(house) == 1)
            assert len(house.service.live()) == 1
        until(lambda: not house.service.live())
        house.held.clear()
        assert post(http, key, path, json={"prompt": "another tree"}).status_code == 200


def test_all_that_wait_for_one_picture_get_it(http: httpx.Client, house: House) -> None:
    before = set(house.folder.glob("image_*"))
    body = {"prompt": "hold encoder", "seed": 7, "response_format": "b64_json"}
    with http, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(post, http, "crowd", "/v1/images/generations", json=body) for _ in range(8)]
        until(lambda: waiting(house) == 8)
        (lease,) = house.held
        house.held.pop(lease).let_go(lease)
        pictures = [answer.result() for answer in answers]
        assert {picture.status_code for picture in pictures} == {200}
        assert len({picture.json()["data"][0]["b64_json"] for picture in pictures}) == 1
        until(lambda: set(house.folder.glob("image_*")) <= before)


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_that_is_none_is_400(http: httpx.Client, key: str) -> None:
    with http:
        answer = post(http, key)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
