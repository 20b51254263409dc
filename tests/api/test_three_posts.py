"""Tasks in three posts over real ports: the decoder's first, then the transformer's, then the encoder's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import asking
from triptych.api import task_events, tickets
from triptych.config import METRICS_OFFSET, ServerConfig
from triptych.errors import ConfigError

MOST_LIVE = 8
ORDER = ("decoder", "transformer", "encoder")


@pytest.fixture(scope="module")
def trio(make_house: Callable[..., Any], task_ports: tuple[int, ...]) -> Iterator[Any]:
    """A live server with three task ports."""
    with make_house(task_ports=task_ports, max_live_requests=MOST_LIVE) as house:
        yield house


def url(house: Any, part: str) -> str:
    port = dict(zip(tickets.PARTS, house.config.task_ports, strict=True))[part]
    return f"http://127.0.0.1:{port}"


def post(house: Any, part: str, payload: dict[str, Any]) -> dict[str, Any]:
    response = asking.post(f"{url(house, part)}/v1/tasks/video/", json=payload)
    assert response.status_code == 200, response.text
    return response.json()


def poll(house: Any, part: str, task: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        status = asking.get(f"{url(house, part)}/v1/tasks/{task}/status").json()
        if status["status"] in ("completed", "failed", "cancelled"):
            return status
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_three_posts_make_one_video_that_the_decoder_tells_of(trio: Any) -> None:
    payload = {
        "prompt": "a cat",
        "negative_prompt": "",
        "image_path": "",
        "seed": 42,
        "save_result_path": "save_results/wan_t2v.mp4",
    }
    made = len(trio.seen)
    task = post(trio, "decoder", payload)
    assert task == {
        "task_id": task["task_id"],
        "task_status": "pending",
        "save_result_path": "save_results/wan_t2v.mp4",
    }
    post(trio, "transformer", payload)
    assert asking.get(f"{url(trio, 'decoder')}/v1/tasks/{task['task_id']}/status").json()["status"] == "pending"
    assert len(trio.seen) == made
    post(trio, "encoder", payload)
    status = poll(trio, "decoder", task["task_id"])
    assert (status["status"], status["error"]) == ("completed", None)
    assert len(trio.seen) == made + 1
    assert (trio.folder / status["save_result_path"]).read_bytes() == trio.clip
    assert asking.get(f"{url(trio, 'decoder')}/v1/tasks/{task['task_id']}/result").content == trio.clip


def test_two_clients_that_interleave_get_their_own_prompts_back(trio: Any) -> None:
    made = len(trio.seen)
    found: dict[str, str] = {}
    for part in ORDER:
        for who in ("cat", "dog") if part != "transformer" else ("dog", "cat"):
            found.setdefault(who, post(trio, part, {"prompt": f"a {who}"})["task_id"])
    for task in found.values():
        assert poll(trio, "decoder", task)["status"] == "completed"
    assert sorted(params["prompt"] for params, _ in trio.seen[made:]) == ["a cat", "a dog"]
    for who, task in found.items():
        record = next(r for r in trio.service._records if r.metadata.get("task_id") == task)
        assert record.params["prompt"] == f"a {who}"


def test_many_clients_at_once_are_all_served(trio: Any) -> None:
    made = len(trio.seen)
    tasks: dict[int, str] = {}

    def client(number: int) -> None:
        payload = {"prompt": f"client {number}", "seed": number}
        tasks[number] = post(trio, "decoder", payload)["task_id"]
        post(trio, "transformer", payload)
        post(trio, "encoder", payload)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for task in tasks.values():
        assert poll(trio, "decoder", task)["status"] == "completed"
    assert sorted(params["seed"] for params, _ in trio.seen[made:]) == list(range(8))
    assert len(set(tasks.values())) == 8


@pytest.mark.parametrize("broken", [("decoder",), ("decoder", "transformer")])
def test_a_client_that_starts_again_gets_its_video(trio: Any, broken: tuple[str, ...]) -> None:
    made = len(trio.seen)
    payload = {"prompt": f"again after {len(broken)}", "seed": 42}
    for part in broken:
        post(trio, part, payload)
    task, *_ = (post(trio, part, payload)["task_id"] for part in ORDER)
    assert poll(trio, "decoder", task)["status"] == "completed"
    assert len(trio.seen) == made + 1


def test_a_task_id_of_the_clients_own_is_kept(trio: Any) -> None:
    for part in ORDER:
        assert post(trio, part, {"prompt": "a cat", "task_id": "own"})["task_id"] == "own"
    assert poll(trio, "decoder", "own")["status"] == "completed"
    response = asking.post(f"{url(trio, 'decoder')}/v1/tasks/video/", json={"prompt": "a dog", "task_id": "own"})
    assert response.status_code == 409


def test_posts_that_are_repeated_under_one_key_lead_to_the_first_ones_job(trio: Any) -> None:
    made = len(trio.seen)
    payload, headers = {"prompt": "a cat"}, {"Idempotency-Key": "three posts"}
    first, second = (
        {asking.post(f"{url(trio, p)}/v1/tasks/video/", json=payload, headers=headers).json()["task_id"] for p in ORDER}
        for _ in range(2)
    )
    for (task,) in (first, second):
        assert poll(trio, "decoder", task)["status"] == "completed"
    assert len(trio.seen) == made + 1


def test_a_post_that_stays_alone_ends_with_the_reason(trio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "PATIENCE_SECONDS", 0.2)
    task = post(trio, "decoder", {"prompt": "alone"})["task_id"]
    status = poll(trio, "decoder", task)
    assert (status["status"], status["error_type"]) == ("failed", "unmatched")
    assert "encoder and transformer" in status["error"]
    events = asking.get(f"{trio.url}/v1/tasks/{task}/events").text
    assert "event: failed" in events
    assert task in asking.get(f"{trio.url}/v1/tasks/").json()


def test_a_post_that_waits_can_be_stopped(trio: Any) -> None:
    task = post(trio, "decoder", {"prompt": "never mind"})["task_id"]
    assert asking.delete(f"{url(trio, 'decoder')}/v1/tasks/{task}").json()["stop_status"] == "success"
    assert asking.get(f"{trio.url}/v1/tasks/{task}/status").json()["status"] == "cancelled"
    assert asking.delete(f"{trio.url}/v1/tasks/{task}").json()["stop_status"] == "do_nothing"


def test_a_task_is_followed_from_its_first_post_on(trio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_events, "REFRESH_SECONDS", 0.02)
    task = post(trio, "decoder", {"prompt": "followed"})["task_id"]
    with asking.stream("GET", f"{trio.url}/v1/tasks/{task}/events") as response:
        lines = response.iter_lines()
        assert next(lines) == "event: queued"
        post(trio, "transformer", {"prompt": "followed"})
        post(trio, "encoder", {"prompt": "followed"})
        told = list(lines)
    assert "event: done" in told
    assert all(task in line for line in told if line.startswith("data: "))


def test_the_door_itself_takes_whole_tasks(trio: Any) -> None:
    task = asking.post(f"{trio.url}/v1/tasks/video/", json={"prompt": "whole"}).json()["task_id"]
    assert poll(trio, "decoder", task)["status"] == "completed"


def test_a_bad_field_is_refused_on_every_port(trio: Any) -> None:
    for part in ORDER:
        response = asking.post(f"{url(trio, part)}/v1/tasks/video/", json={"prompt": "a", "infer_steps": 0})
        assert response.status_code == 400


def test_metrics_lie_ten_thousand_above(trio: Any) -> None:
    for port in trio.config.task_ports:
        text = asking.get(f"http://127.0.0.1:{port + METRICS_OFFSET}/metrics").text
        assert "triptych_requests" in {family.name for family in text_string_to_metric_families(text)}
        assert asking.get(f"http://127.0.0.1:{port + METRICS_OFFSET}/health").status_code == 200
        for path in ("/v1/models", "/v1/tasks/queue/status", "/openapi.json"):
            answer = asking.get(f"http://127.0.0.1:{port + METRICS_OFFSET}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "metrics_port")


@pytest.mark.parametrize(
    ("ports", "reason"),
    [((1, 2, 60000), "at most 55535"), ((30000, 1, 2), "30000 is used twice"), ((5, 5, 6), "5 is used twice")],
)
def test_ports_that_cannot_be_are_refused(ports: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerConfig(task_ports=ports)


@contextmanager
def full(house: Any) -> Iterator[None]:
    """As many requests live as may be."""
    slow = [asking.post(f"{house.url}/v1/videos", json={"prompt": f"slow {i}"}).json()["id"] for i in range(MOST_LIVE)]
    try:
        yield
    finally:
        for job in slow:
            asking.delete(f"{house.url}/v1/videos/{job}")
        house.held.clear()


@pytest.mark.parametrize("own", [{}, {"task_id": "patient"}])
@pytest.mark.parametrize("again", [("encoder",), ORDER])
def test_a_task_that_is_put_off_at_its_last_post_waits_for_that_post_to_come_again(
    trio: Any, own: dict[str, str], again: tuple[str, ...]
) -> None:
    """Symptom: whoever came again, as he was told to, lacked the first two posts, and his task id was taken."""
    if own:
        own = {"task_id": f"patient-{len(again)}"}
    payload = {"prompt": f"too much {own} {again}", **own}
    with full(trio):
        task = post(trio, "decoder", payload)["task_id"]
        post(trio, "transformer", payload)
        for _ in range(2):
            response = asking.post(f"{url(trio, 'encoder')}/v1/tasks/video/", json=payload)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) > 0
        assert asking.get(f"{trio.url}/v1/tasks/{task}/status").json()["status"] == "pending"
    (found,) = {post(trio, part, payload)["task_id"] for part in again}
    assert found == task or (len(again) > 1 and not own)
    assert poll(trio, "decoder", found)["status"] == "completed"
    assert [params["prompt"] for params, _ in trio.seen].count(payload["prompt"]) == 1


def test_a_task_that_is_put_off_and_never_comes_again_ends(trio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with full(trio):
        task = post(trio, "decoder", {"prompt": "gone"})["task_id"]
        post(trio, "transformer", {"prompt": "gone"})
        assert asking.post(f"{url(trio, 'encoder')}/v1/tasks/video/", json={"prompt": "gone"}).status_code == 429
    monkeypatch.setattr(tickets, "PATIENCE_SECONDS", -3600.0)
    status = poll(trio, "decoder", task)
    assert (status["status"], status["error_type"]) == ("failed", "unmatched")
