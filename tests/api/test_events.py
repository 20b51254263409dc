"""Following a job: what the stream tells while it waits, runs and ends, and that readers cost nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import asking
from triptych.api import events
from triptych.core.instance_events import Stepped


@pytest.fixture
def http(house: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url, timeout=60) as client:
        yield client


def read(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Events as (name, data); comments are passed over."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def held(house: Any, job: str) -> Any:
    """The denoiser stage of a job that waits to be let go."""
    deadline = time.monotonic() + 60
    while True:
        found = [lease for lease in list(house.held) if lease.request == job]
        if found:
            return found[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def reached(http: httpx.Client, job: str) -> None:
    """Wait until the server knows the step at which a slow job is held, which the instance knows first."""
    until(lambda: http.get(f"/v1/videos/{job}").json()["step"] == 5)


def teach(http: httpx.Client) -> None:
    """Run one job, from whose stages the server learns how long they take."""
    done = http.post("/v1/videos", json={"prompt": "a cat"}).json()["id"]
    list(http.get(f"/v1/videos/{done}/events").iter_lines())


def test_a_stream_tells_stages_steps_and_the_end(http: httpx.Client, house: Any) -> None:
    teach(http)
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    lease = held(house, job)
    reached(http, job)
    told: list[tuple[str, dict[str, Any]]] = []
    with http.stream("GET", f"/v1/videos/{job}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        stream = read(response.iter_lines())
        told.append(next(stream))
        painter = house.held.pop(lease)
        painter.post(Stepped(lease=lease, step=8, steps=10))
        told.append(next(stream))
        painter.let_go(lease)
        told.extend(stream)
    assert told[0][1]["stage"] == "denoising_running"
    percents = [data["progress"] for _, data in told]
    assert percents == sorted(percents)
    assert (told[0][1]["step"], told[0][1]["steps"]) == (5, 10)
    name, data = told[1]
    assert (name, data["step"], data["id"], data["status"]) == ("step", 8, job, "in_progress")
    assert data["eta_seconds"] is not None
    name, data = told[-1]
    assert (name, data["status"], data["progress"], data["eta_seconds"]) == ("done", "completed", 100, 0)
    assert [name for name, _ in told].count("done") == 1


def test_a_preview_comes_once_as_a_data_url(http: httpx.Client, house: Any) -> None:
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    lease = held(house, job)
    reached(http, job)
    told: list[tuple[str, dict[str, Any]]] = []
    with http.stream("GET", f"/v1/videos/{job}/events") as response:
        stream = read(response.iter_lines())
        told.append(next(stream))
        painter = house.held.pop(lease)
        painter.post(Stepped(lease=lease, step=8, steps=10, preview=b"picture"))
        told.append(next(stream))
        painter.post(Stepped(lease=lease, step=9, steps=10))
        told.append(next(stream))
        painter.let_go(lease)
        told.extend(stream)
    assert [(name, data["step"]) for name, data in told[1:3]] == [("step", 8), ("step", 9)]
    assert [data["preview"] for _, data in told[:3]] == [None, "data:image/webp;base64,cGljdHVyZQ==", None]
    assert all(data["preview"] is None for _, data in told[3:])


def test_an_ended_job_is_told_in_one_event(http: httpx.Client) -> None:
    job = http.post("/v1/videos", json={"prompt": "fail"}).json()["id"]
    last = list(read(http.get(f"/v1/videos/{job}/events").iter_lines()))[-1]
    (again,) = read(http.get(f"/v1/videos/{job}/events").iter_lines())
    assert again == last
    name, data = again
    assert name == "failed"
    assert "the paint is dry" in data["error"]["message"]


def test_places_in_the_queue_move_and_starts_are_predicted(http: httpx.Client, house: Any) -> None:
    teach(http)
    jobs = [http.post("/v1/videos", json={"prompt": f"slow {i}"}).json()["id"] for i in range(7)]
    leases = [held(house, job) for job in jobs[:4]]  # the denoiser has four slots
    until(lambda: http.get("/server_info").json()["roles"]["denoiser"]["queue_depth"] == 3)
    try:
        with http.stream("GET", f"/v1/videos/{jobs[5]}/events") as response:
            stream = read(response.iter_lines())
            name, data = next(stream)
            assert (name, data["position"]) == ("queued", 1)
            assert data["starts_in_seconds"] is not None
            assert data["eta_seconds"] >= data["starts_in_seconds"]
            lease = leases.pop()
            house.held.pop(lease).let_go(lease)
            name, data = next(stream)
            assert (name, data["position"]) == ("queued", 0)
    finally:
        for job in jobs:
            http.delete(f"/v1/videos/{job}")
        house.held.clear()


def test_deleting_a_job_ends_its_streams(http: httpx.Client, house: Any) -> None:
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    held(house, job)
    with http.stream("GET", f"/v1/videos/{job}/events") as response:
        stream = read(response.iter_lines())
        next(stream)
        asking.delete(f"{house.url}/v1/videos/{job}")
        name, data = list(stream)[-1]
    assert (name, data["status"], data["error"]["code"]) == ("failed", "failed", "cancelled")
    house.held.clear()


def test_a_silent_job_is_kept_alive_by_comments(http: httpx.Client, house: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.0)
    monkeypatch.setattr(events, "REFRESH_SECONDS", 0.02)
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    held(house, job)
    with http.stream("GET", f"/v1/videos/{job}/events") as response:
        for line in response.iter_lines():
            if line == ": keep-alive":
                break
    http.delete(f"/v1/videos/{job}")
    house.held.clear()


def test_a_reader_that_goes_leaves_nothing_behind(http: httpx.Client, house: Any) -> None:
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    held(house, job)
    entry = house.service._records.get(job)
    with http.stream("GET", f"/v1/videos/{job}/events") as response:
        lines = response.iter_lines()  # held: an iterator that is collected closes the connection
        next(lines)
        until(lambda: len(entry.watchers) == 1)
    until(lambda: not entry.watchers)
    http.delete(f"/v1/videos/{job}")
    house.held.clear()


def test_a_reader_that_does_not_read_misses_states_and_holds_no_memory(http: httpx.Client, house: Any) -> None:
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    lease = held(house, job)
    painter = house.held.pop(lease)
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        wire.connect(("127.0.0.1", house.config.port))
        wire.sendall(f"GET /v1/videos/{job}/events HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        wire.recv(16)
        before = threading.active_count()
        for step in range(20_000):
            painter.post(Stepped(lease=lease, step=step % 1000, steps=1000))
        until(lambda: http.get(f"/v1/videos/{job}").json()["step"] == 999, 60)
        assert threading.active_count() <= before
        assert len(house.service._records.get(job).watchers) <= 1
        painter.let_go(lease)
        until(lambda: http.get(f"/v1/videos/{job}").json()["status"] == "completed", 60)
        received = b""
        while b"event: done" not in received:
            chunk = wire.recv(65536)
            assert chunk
            received += chunk
    assert received.count(b"event: step") < 2000, "nine in ten are not told of"


def test_the_events_of_nothing_are_not_found(http: httpx.Client) -> None:
    assert http.get("/v1/videos/video_0/events").status_code == 404


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
