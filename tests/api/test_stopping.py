"""A server that is told to stop answers who still waits, and leaves no work behind that nobody comes for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

SYNC = pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/tasks/image/sync"])


def stopped_while_it_waits(
    open_house: Callable[..., AbstractContextManager[Any]], state: Path, path: str, headers: dict[str, str]
) -> httpx.Response:
    """The answer to a request whose picture takes for ever."""
    with ThreadPoolExecutor(1) as pool:
        with open_house(state_dir=state) as house:
            waiting = pool.submit(
                httpx.post, house.url + path, json={"prompt": "a slow cat"}, headers=headers, timeout=60
            )
            deadline = time.monotonic() + 60
            while not house.held:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        return waiting.result(60)


def remembered(open_house: Callable[..., AbstractContextManager[Any]], state: Path) -> list[str]:
    """Ids of the jobs that the next server on the same folder knows."""
    with open_house(state_dir=state) as house, httpx.Client(base_url=house.url, timeout=60) as http:
        return list(http.get("/v1/tasks/").json())


@SYNC
def test_who_waits_is_told_to_come_again_and_the_job_is_gone(make_house: Any, tmp_path: Path, path: str) -> None:
    answer = stopped_while_it_waits(make_house, tmp_path, path, {})
    assert answer.status_code == 503
    assert "the server is stopping" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert remembered(make_house, tmp_path) == []


@SYNC
def test_the_job_of_an_idempotency_key_is_there_for_who_comes_again(make_house: Any, tmp_path: Path, path: str) -> None:
    answer = stopped_while_it_waits(make_house, tmp_path, path, {"Idempotency-Key": "cat"})
    assert answer.status_code == 503
    assert len(remembered(make_house, tmp_path)) == 1


def test_a_body_that_is_still_on_its_way_is_answered(make_house: Any) -> None:
    with make_house() as house:
        client = socket.create_connection(("127.0.0.1", house.config.port))
        head = "POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100"
        client.sendall(f'{head}\r\n\r\n{{"prompt": "a c'.encode())
        time.sleep(1)
    with client:
        client.settimeout(60)
        answer = HTTPResponse(client)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "not_ready")
