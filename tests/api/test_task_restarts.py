"""Tasks, their names and the paths that they asked for outlive the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests import asking
from tests.api.conftest import House, schema
from tests.server.house import QUICK


@contextmanager
def life(folder: Path, ports: tuple[int, ...]) -> Iterator[tuple[House, httpx.Client]]:
    """One life of a server whose media and state lie in ``folder``."""
    house = House(folder / "media", schema(with_count=True), state_dir=folder / "state", task_ports=ports, router=QUICK)
    house.open()
    try:
        with httpx.Client(base_url=house.url, timeout=60) as http:
            yield house, http
    finally:
        house.close()


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def status(http: httpx.Client, task: str) -> Any:
    return http.get(f"/v1/tasks/{task}/status").json().get("status")


def post(http: httpx.Client, **fields: Any) -> str:
    response = http.post("/v1/tasks/video/", json=fields)
    assert response.status_code == 200, response.text
    return response.json()["task_id"]


def test_a_task_is_found_and_saved_by_the_next_life_of_the_server(tmp_path: Path, task_ports: tuple[int, ...]) -> None:
    with life(tmp_path, task_ports) as (house, http):
        post(http, prompt="a cat", task_id="done", save_result_path="a/done.mp4")
        until(lambda: status(http, "done") == "completed", "the first task")
        (house.folder / "a" / "done.mp4").rename(tmp_path / "collected.mp4")
        payload = {"prompt": "slow", "save_result_path": "a/late.mp4"}
        doors = [f"http://127.0.0.1:{port}/v1/tasks/video/" for port in task_ports]
        (late,) = {asking.post(door, json=payload).json()["task_id"] for door in doors}
        post(http, prompt="slow", task_id="stopped")
        until(lambda: len(house.held) == 2, "both slow tasks")
    with life(tmp_path, task_ports) as (house, http):
        assert list(http.get("/v1/tasks/").json()) == ["done", late, "stopped"]
        assert status(http, "done") == "completed"
        for path in ("tasks/done/result", "files/download/a/done.mp4"):
            assert http.get(f"/v1/{path}").content == house.clip
        assert "event: done" in http.get("/v1/tasks/done/events").text
        assert http.delete("/v1/tasks/done").json()["stop_status"] == "do_nothing"
        again = http.post("/v1/tasks/video/", json={"prompt": "a dog", "task_id": "done"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "task_exists")
        assert http.delete("/v1/tasks/stopped").json()["stop_status"] == "success"
        until(lambda: status(http, "stopped") == "cancelled", "the task that was stopped")
        until(lambda: house.held, "the task that goes on")
        for lease, painter in list(house.held.items()):
            painter.let_go(lease)
        # The file comes unasked.
        until((house.folder / "a" / "late.mp4").exists, "the file where it was wanted")
        assert status(http, late) == "completed"
        assert http.get("/v1/files/download/a/late.mp4").content == house.clip
        assert not (house.folder / "a" / "done.mp4").exists()  # who took it away has it
