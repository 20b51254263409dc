"""Bodies that stall or break off, over a real socket, and the id that every answer carries."""

from __future__ import annotations

import logging
import socket
from typing import Any

import httpx
import pytest

from tests.api.slow import dribble
from triptych.api import gate

HEAD = b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"


def test_a_body_that_stalls_is_given_up(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "STALL_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", house.config.port), timeout=60) as wire:
        wire.sendall(HEAD + b'{"prompt"')
        answer = b"".join(iter(lambda: wire.recv(65536), b""))  # until the server closes
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"9 bytes of the body came" in answer
    assert b"pauses of 0.3 seconds" in answer


def test_a_body_that_comes_byte_by_byte_is_given_up_though_it_never_pauses(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "STALL_SECONDS", 2.0)
    with socket.create_connection(("127.0.0.1", house.config.port), timeout=60) as wire:
        wire.sendall(HEAD.replace(b" 100", b" 100000"))
        answer = dribble(wire, b"x")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"on the whole 2048 bytes per second" in answer


def test_a_client_that_breaks_off_its_body_is_no_error(house: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="triptych.api")
    with socket.create_connection(("127.0.0.1", house.config.port), timeout=60) as wire:
        wire.sendall(HEAD + b'{"prompt"')
    with httpx.Client(base_url=house.url, timeout=60) as http:
        while "hung up" not in caplog.text:
            assert http.get("/health").status_code == 200
        assert 'status="499"' in http.get("/metrics").text
    assert all(record.levelno < logging.WARNING for record in caplog.records if record.name.startswith("triptych.api"))


def test_every_answer_carries_an_id_of_its_own(house: Any) -> None:
    with httpx.Client(base_url=house.url, timeout=60) as http:
        ids = {http.get(path).headers["x-request-id"] for path in ("/health", "/nothing", "/v1/videos?limit=0")}
        assert len(ids) == 3
        assert http.get("/health", headers={"x-request-id": "trace-1"}).headers["x-request-id"] == "trace-1"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/health", "/v1/videos", "/v1/images/generations", "/v1/videos/video_1/events", "/no"]
)
def test_no_other_origin_is_let_in(house: Any, method: str, path: str) -> None:
    asking = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    with httpx.Client(base_url=house.url, timeout=60) as http:
        answer = http.request(method, path, headers=asking, json={"prompt": "a cat"} if method == "POST" else None)
    assert not [name for name in answer.headers if name.startswith("access-control")]
