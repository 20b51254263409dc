"""Clients that drag out what they send or what they read, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop

from tests import asking
from tests.api.slow import dribble
from triptych.api import connection
from triptych.launch.ports import free_ports, listen

FILM = bytes(range(256)) * (64 << 10)
"""16 MiB: more than the kernel takes for a client that does not read."""


@pytest.fixture(scope="module")
def archive(make_house: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """A live server whose videos are large."""
    with make_house(clip=FILM) as house:
        yield house


def dial(house: Any, *, room: int | None = None) -> socket.socket:
    """A connection; ``room``: bytes that its kernel takes before they are read."""
    wire = socket.socket()
    if room is not None:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    wire.settimeout(60)
    wire.connect(("127.0.0.1", house.config.port))
    return wire


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines(house: Any) -> list[connection.Connection]:
    """The server's side of all connections."""
    return list(house._server.server_state.connections)


def test_a_head_that_comes_byte_by_byte_is_given_up(archive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    with dial(archive) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
        assert dribble(wire, b"a").startswith(b"HTTP/1.1 408 ")


def test_a_connection_on_which_nothing_comes_is_closed(archive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    with dial(archive) as wire:
        assert wire.recv(100) == b""


def test_a_head_without_end_is_refused(archive: Any) -> None:
    with dial(archive) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\n")
        answer = dribble(wire, b"x-more: " + b"a" * 8000 + b"\r\n")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")  # empty: swallowed by the connection's reset
    assert asking.get(f"{archive.url}/health").status_code == 200


def test_a_body_that_goes_on_after_its_answer_ends_the_connection(
    archive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    with dial(archive) as wire:
        wire.sendall(b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n")
        assert dribble(wire, b"a").startswith(b"HTTP/1.1 413 ")


def test_an_answer_may_take_longer_than_a_head_and_the_next_head_has_its_own_time(
    archive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 3.0)
    with httpx.Client(base_url=archive.url, timeout=60) as http:
        job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
        until(lambda: archive.held)
        with http.stream("GET", f"/v1/videos/{job}/events") as stream:
            told = stream.iter_lines()
            assert next(told).startswith("event: ")
            time.sleep(3.5)  # the answer takes so long
            for lease in list(archive.held):
                archive.held.pop(lease).let_go(lease)
            assert "event: done" in told
        assert http.get("/health").status_code == 200


def test_who_does_not_read_a_download_is_cut_off_and_costs_no_memory(
    archive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.Client(base_url=archive.url, timeout=60) as http:
        job = http.post("/v1/videos", json={"prompt": "a cat"}).json()["id"]
        until(lambda: http.get(f"/v1/videos/{job}").json()["status"] == "completed")
        assert http.get(f"/v1/videos/{job}/content").content == FILM
    until(lambda: not lines(archive))
    monkeypatch.setattr(connection, "READ_SECONDS", 3.0)  # enough to look at what waits
    with dial(archive, room=4096) as wire:
        wire.sendall(f"GET /v1/videos/{job}/content HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        until(lambda: lines(archive))
        (line,) = lines(archive)
        until(line.transport.get_write_buffer_size)
        waiting = line.transport.get_write_buffer_size()
        assert waiting <= 256 << 10
        until(lambda: not lines(archive))
        got = 0
        with contextlib.suppress(ConnectionResetError):
            while part := wire.recv(1 << 20):
                got += len(part)
        assert got < len(FILM)


def test_who_reads_slowly_gets_everything(archive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_SECONDS", 5.0)
    with httpx.Client(base_url=archive.url, timeout=60) as http:
        job = http.post("/v1/videos", json={"prompt": "a cat"}).json()["id"]
        until(lambda: http.get(f"/v1/videos/{job}").json()["status"] == "completed")
    with dial(archive, room=65536) as wire:
        wire.sendall(f"GET /v1/videos/{job}/content HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        got = bytearray()
        while part := wire.recv(1 << 20):
            got += part
            time.sleep(0.001)
    assert got.endswith(FILM)


def test_a_request_that_comes_in_one_read_has_no_endless_head(archive: Any) -> None:
    """Symptom: a body of more than 64 KiB that came together with its head was refused as a head of that length."""
    body = b'{"prompt": "a cat", "no_such_field": "' + b"a" * (100 << 10) + b'"}'
    kind = "content-type: application/json\r\n"
    head = f"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {len(body)}\r\n\r\n"
    for _ in range(20):  # how many reads it takes is the kernel's business
        with dial(archive) as wire:
            wire.sendall(head.encode() + body)
            assert wire.recv(65536).startswith(b"HTTP/1.1 400 ")
        with dial(archive) as wire:
            wire.sendall(head.encode())
            time.sleep(0.01)
            wire.sendall(body)
            assert wire.recv(65536).startswith(b"HTTP/1.1 400 ")


LARGE = b"a" * (16 << 20)


async def large(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answer is written in one piece, as JSON is."""
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    headers = [(b"content-length", str(len(LARGE)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": LARGE})


@contextlib.contextmanager
def serving(run: Callable[[Any], Any]) -> Iterator[int]:
    """The port of a server of that application."""
    (port,) = free_ports(1)
    door = listen("127.0.0.1", port, "--port")
    server = uvicorn.Server(connection.http_settings(large))
    thread = threading.Thread(target=lambda: run(server.serve(sockets=[door])))
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()
        door.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_who_reads_a_large_answer_slowly_gets_all_of_it_and_who_stops_does_not(
    run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: images as base64 in JSON were cut off after a minute, however steadily they were read."""
    monkeypatch.setattr(connection, "READ_SECONDS", 2.0)
    with serving(run) as port, socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        wire.settimeout(60)
        wire.connect(("127.0.0.1", port))
        for steadily in (True, False):
            wire.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            got = 0
            with contextlib.suppress(ConnectionResetError):
                while got < len(LARGE) and (part := wire.recv(256 << 10)):
                    got += len(part)
                    if steadily:
                        time.sleep(0.04)
                    elif got > len(LARGE) // 8:
                        time.sleep(6)  # without a word, for three times as long as is allowed
            assert (got >= len(LARGE)) is steadily
