"""How much memory clients can take: bodies, pictures that are fetched, and pictures of jobs that wait."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from PIL import Image

from tests import asking
from triptych.api.fetch import Fetcher
from triptych.config import ServerConfig
from triptych.errors import ConfigError

BODY = 128 << 10


def noise() -> bytes:
    """A picture of some 66 KB."""
    buffer = io.BytesIO()
    Image.effect_noise((256, 256), 100).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def post(house: Any, **fields: Any) -> httpx.Response:
    files = {"image": ("a.png", noise()), "prompt": (None, "hold encoder")}
    return asking.post(f"{house.url}/v1/videos", files={**files, **fields})


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def narrow(make_house: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with make_house(max_upload_bytes=BODY, max_upload_memory=3 * BODY) as house:
        yield house


def test_pictures_of_waiting_jobs_have_a_bound_and_make_room_when_the_jobs_end(narrow: Any) -> None:
    answers = [post(narrow) for _ in range(8)]
    taken = [answer.json()["id"] for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 3 <= len(taken) <= 5
    assert {answer.status_code for answer in refused} == {429}
    assert "--max-upload-memory" in refused[0].json()["error"]["message"]
    assert int(refused[0].headers["retry-after"]) > 0
    assert asking.post(f"{narrow.url}/v1/videos", json={"prompt": "a cat"}).status_code == 200
    for job in taken:
        asking.delete(f"{narrow.url}/v1/videos/{job}")
    narrow.held.clear()
    again = post(narrow)
    assert again.status_code == 200
    asking.delete(f"{narrow.url}/v1/videos/{again.json()['id']}")
    narrow.held.clear()


def test_bodies_that_are_still_coming_count_and_are_forgotten_with_their_connection(narrow: Any) -> None:
    kind = "content-type: application/json\r\n"
    head = f"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {BODY}\r\n\r\n"
    wires = [socket.create_connection(("127.0.0.1", narrow.config.port), timeout=60) for _ in range(3)]
    for wire in wires:
        wire.sendall(head.encode() + b" " * (BODY - 1))
    until(lambda: asking.post(f"{narrow.url}/v1/videos", json={"prompt": "a"}).status_code == 429)
    for wire in wires:
        wire.close()
    until(lambda: asking.post(f"{narrow.url}/v1/videos", json={"prompt": "a"}).status_code == 200)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a server fetches, each of which has a picture."""
    found: list[str] = []

    async def fetch(self: Fetcher, field: str, url: str, took: Callable[[int], None]) -> bytes:
        found.append(url)
        took(len(noise()))
        return noise()

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    return found


@pytest.fixture(scope="module")
def far(make_house: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with make_house(
        allow_image_urls=True, max_live_requests=2, max_upload_bytes=BODY, max_upload_memory=2 * BODY
    ) as house:
        yield house


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "image": ["http://example.com/a.png"] * 8}, "image"),
        ({"prompt": "a", "image": "http://example.com/a.png", "input_reference": "http://example.com/b.png"}, "image"),
        ({"image": "http://example.com/a.png"}, "prompt"),
        ({"prompt": "a", "image": {"image_url": {"url": "HTTPS://example.com/a.png"}}, "widht": 64}, "widht"),
        ({"prompt": "a", "image": "http://example.com/a.png", "queue_timeout": -1}, "queue_timeout"),
    ],
)
def test_nothing_is_fetched_for_a_request_that_is_refused_anyway(
    far: Any, fetched: list[str], fields: dict[str, Any], param: str
) -> None:
    """Symptom: a request of 500 bytes had 256 MiB fetched for each of its fields."""
    answer = asking.post(f"{far.url}/v1/videos", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in (param, "input_reference")
    assert fetched == []


def test_nothing_is_fetched_while_there_is_no_room_for_the_request(far: Any, fetched: list[str]) -> None:
    slow = [asking.post(f"{far.url}/v1/videos", json={"prompt": "slow"}).json()["id"] for _ in range(2)]
    request = {"prompt": "a", "image": "http://example.com/a.png"}
    assert asking.post(f"{far.url}/v1/videos", json=request).status_code == 429
    assert fetched == []
    for job in slow:
        asking.delete(f"{far.url}/v1/videos/{job}")
    far.held.clear()
    assert asking.post(f"{far.url}/v1/videos", json=request).status_code == 200
    assert fetched == ["http://example.com/a.png"]


def test_a_bound_below_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="max-upload-memory"):
        ServerConfig(max_upload_memory=1 << 20)
