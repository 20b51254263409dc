"""Decoding pictures keeps nobody else waiting, and is done only for those who are let in and still there."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from PIL import ExifTags, Image

from tests import asking
from tests.api.slow import dial
from triptych.api import darkroom
from triptych.api.pictures import Size, check_picture
from triptych.config import KEY_PREFIX

KEY = "a-key-of-the-tests"
HEADERS = {"authorization": f"Bearer {KEY}"}
SLOW = (31, 7)
"""The size of a picture that takes long to decode."""


def picture(size: Size = SLOW, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, kind, **options)
    return buffer.getvalue()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Slow:
    """Stands for the decoding of pictures, and for the time that it takes with some."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Event()

    def check(self, field: str, data: bytes) -> Size:
        size = check_picture(field, data)
        if size == SLOW:
            self.begun += 1
            assert self.go.wait(60)
        return size


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    stub = Slow()
    monkeypatch.setattr(darkroom, "check_picture", stub.check)
    yield stub
    stub.go.set()


@pytest.fixture(scope="module")
def keyed(make_house: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    digest = KEY_PREFIX + hashlib.sha256(KEY.encode()).hexdigest()
    with make_house(
        api_keys=(digest,), max_concurrency_per_key=3, max_upload_bytes=1 << 20, max_upload_memory=2 << 20
    ) as house:
        yield house


def post(house: Any, data: bytes | None = None) -> httpx.Response:
    files: dict[str, Any] = {"prompt": (None, "a cat")} | ({} if data is None else {"image": ("a", data)})
    return asking.post(f"{house.url}/v1/videos", files=files, headers=HEADERS)


def test_who_sends_no_picture_does_not_wait_for_those_that_are_decoded(house: Any, slow: Slow) -> None:
    """Symptom: 42 pictures that take seconds each kept every other request waiting for minutes."""
    with ThreadPoolExecutor(60) as clients:
        answers = [clients.submit(post, house, picture()) for _ in range(60)]
        until(lambda: slow.begun == darkroom.THREADS)
        done = post(house)
        assert done.status_code == 200
        until(lambda: asking.get(f"{house.url}/v1/videos/{done.json()['id']}/content").status_code == 200)
        assert asking.post(f"{house.url}/v1/videos", json={"prompt": "a", "widht": 1}).status_code == 400
        assert slow.begun == darkroom.THREADS
        slow.go.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_a_key_has_no_more_pictures_decoded_than_it_may_have_requests(keyed: Any, slow: Slow) -> None:
    with ThreadPoolExecutor(10) as clients:
        answers = [clients.submit(post, keyed, picture()) for _ in range(10)]
        until(lambda: sum(answer.done() for answer in answers) == 7)
        assert {answer.result().status_code for answer in answers if answer.done()} == {429}
        slow.go.set()
        assert sorted(answer.result().status_code for answer in answers) == [200] * 3 + [429] * 7


def test_no_picture_is_decoded_for_a_client_that_has_hung_up(house: Any, slow: Slow) -> None:
    data = "data:image/png;base64," + base64.b64encode(picture()).decode()
    wires = [dial(house.config.port, "/v1/videos", {"prompt": "a", "image": data}) for _ in range(8)]
    until(lambda: slow.begun == darkroom.THREADS)
    for wire in wires:
        wire.close()
    slow.go.set()
    assert post(house, picture((8, 8))).status_code == 200  # which came behind them
    assert slow.begun == darkroom.THREADS


def test_a_turn_that_does_not_come_is_put_off(house: Any, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as clients:
        for _ in range(darkroom.THREADS):
            clients.submit(post, house, picture())
        until(lambda: slow.begun == darkroom.THREADS)
        monkeypatch.setattr(darkroom, "WAIT_SECONDS", 0.05)
        refused = post(house, picture((8, 8)))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        slow.go.set()


def test_what_decoding_takes_is_room_that_others_cannot_have(keyed: Any, slow: Slow) -> None:
    large = picture((700, 700))  # of which a bitmap has 1,960,000 bytes
    with ThreadPoolExecutor(1) as clients:
        assert post(keyed, large).status_code == 200
        first = clients.submit(post, keyed, picture() + bytes(900_000))
        until(lambda: slow.begun == 1)
        refused = post(keyed, large)
        assert refused.status_code == 429
        assert "--max-upload-memory" in refused.json()["error"]["message"]
        slow.go.set()
        first.result()
    until(lambda: post(keyed, large).status_code == 200)


def test_a_picture_that_never_has_room_is_refused_for_good(keyed: Any) -> None:
    refused = post(keyed, picture((1000, 1000)))
    assert refused.status_code == 413
    assert refused.json()["error"]["param"] == "image"
    assert "--max-upload-memory" in refused.json()["error"]["message"]


@pytest.mark.parametrize("turn", [1, 6])
def test_instances_get_the_very_bytes_that_were_sent(house: Any, turn: int) -> None:
    """Symptom: a photograph of 10 MB that a phone had marked as turned was held, kept and sent as 137 MB of PNG."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    data = picture((64, 32), "JPEG", exif=exif)
    job = post(house, data)
    assert job.status_code == 200
    until(lambda: any(blobs == (data,) for _, blobs in house.seen))
