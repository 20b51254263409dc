"""What is put off with 429 and when to come again: a full queue, a long wait, a key that asks too often."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import asking
from tests.api.conftest import schema
from tests.server.test_journal import limit_pages
from triptych.config import KEY_PREFIX

KEY = "a-key-of-the-tests"
DIGEST = KEY_PREFIX + hashlib.sha256(KEY.encode()).hexdigest()


def post(house: Any, prompt: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return asking.post(f"{house.url}/v1/videos", json={"prompt": prompt, **fields}, headers=headers)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def queue_of_two(make_house: Any) -> Iterator[Any]:
    with make_house(max_queue=2) as house:
        yield house


def test_a_full_queue_refuses_and_takes_again_when_it_has_room(queue_of_two: Any) -> None:
    house = queue_of_two
    running = [post(house, "slow") for _ in range(4)]  # the denoiser has four slots
    until(lambda: len(house.held) == 4)
    waiting = [post(house, "slow") for _ in range(2)]
    until(lambda: house.service.info()["roles"]["denoiser"]["queue_depth"] == 2)
    refused = post(house, "slow")
    assert refused.status_code == 429
    assert "--max-queue" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    asking.delete(f"{house.url}/v1/videos/{waiting[0].json()['id']}")
    accepted = post(house, "slow")
    assert accepted.status_code == 200
    for answer in (*running, waiting[1], accepted):
        asking.delete(f"{house.url}/v1/videos/{answer.json()['id']}")
    house.held.clear()


def test_a_job_that_cannot_be_written_down_is_refused_with_507_and_others_go_on(
    make_house: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_house(state_dir=tmp_path / "state") as house:
        running = post(house, "slow").json()["id"]
        until(lambda: house.held)
        journal = house.service._keeper._archive._journal
        limit_pages(journal, 0)
        answers = [post(house, "slow " + "x" * 900) for _ in range(20)]  # the last page may have room for a few
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(507, "storage_full")}
        assert refused[0].json()["error"]["message"] == "no room for the journal"
        assert f"free some space in {tmp_path}" in caplog.text
        listed = asking.get(f"{house.url}/v1/videos?limit=100", headers={"authorization": f"Bearer {KEY}"}).json()
        assert len(listed["data"]) == 1 + len(answers) - len(refused)
        limit_pages(journal, 10_000)
        assert post(house, "a cat").status_code == 200
        for lease, painter in list(house.held.items()):
            painter.let_go(lease)
        until(lambda: house.service.get(running).files)


def test_who_would_wait_longer_than_is_allowed_is_told_when_to_come_again(make_house: Any) -> None:
    with make_house(max_wait=1e-7) as house:
        first = post(house, "a cat").json()["id"]
        until(lambda: house.service.get(first).ended)
        job = post(house, "slow").json()["id"]
        refused = post(house, "a cat")
        assert refused.status_code == 429
        assert "would wait for about" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        asking.delete(f"{house.url}/v1/videos/{job}")
        until(lambda: post(house, "a cat").status_code == 200)  # forecasts are half a second old at most


def test_a_request_that_would_wait_beyond_its_own_queue_timeout_is_not_taken_in(queue_of_two: Any) -> None:
    house = queue_of_two
    first = post(house, "a cat").json()["id"]
    until(lambda: house.service.get(first).ended)
    job = post(house, "slow").json()["id"]
    until(lambda: house.held)
    assert post(house, "a cat", queue_timeout=1e-7).status_code == 429
    asking.delete(f"{house.url}/v1/videos/{job}")
    house.held.clear()


def pause(house: Any, answer: httpx.Response, verb: str = "pause") -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return asking.post(f"{house.url}/v1/videos/{answer.json()['id']}/{verb}", headers=headers)


@pytest.mark.parametrize("limit", [{"max_concurrency_per_key": 2}, {"max_live_requests": 2}], ids=str)
def test_paused_requests_hold_no_place_and_have_as_many_of_their_own(make_house: Any, limit: dict[str, int]) -> None:
    """Symptom: two paused jobs of a key kept it from everything for ever, a thousand kept everybody."""
    (setting,) = ("--" + name.replace("_", "-") for name in limit)
    with make_house(api_keys=(DIGEST,), **limit) as house:
        paused = [post(house, "slow") for _ in range(2)]
        assert post(house, "slow").status_code == 429
        assert [pause(house, answer).status_code for answer in paused] == [200, 200]
        status = asking.get(f"{house.url}/v1/service/status", headers={"authorization": f"Bearer {KEY}"}).json()
        assert (status["service_status"], status["pending_tasks"]) == ("idle", 2)
        live = [post(house, "slow") for _ in range(2)]
        assert [answer.status_code for answer in live] == [200, 200]
        assert pause(house, paused[0]).status_code == 200, "it is paused already"
        refused = pause(house, live[0])
        assert refused.status_code == 429
        assert setting in refused.json()["error"]["message"]
        assert pause(house, paused[0], "resume").status_code == 429
        headers = {"authorization": f"Bearer {KEY}"}
        asking.delete(f"{house.url}/v1/videos/{live[0].json()['id']}", headers=headers)
        assert pause(house, paused[0], "resume").status_code == 200
        assert pause(house, live[1]).status_code == 200
        house.held.clear()


def test_paused_requests_do_not_wait_in_the_queue(queue_of_two: Any) -> None:
    house = queue_of_two
    running = [post(house, "slow") for _ in range(4)]
    until(lambda: len(house.held) == 4)
    waiting = [post(house, "slow") for _ in range(2)]
    until(lambda: house.service.info()["roles"]["denoiser"]["queue_depth"] == 2)
    assert post(house, "slow").status_code == 429
    assert pause(house, waiting[0]).status_code == 200
    waiting.append(post(house, "slow"))
    for answer in (*running, *waiting):
        assert answer.status_code == 200
        asking.delete(f"{house.url}/v1/videos/{answer.json()['id']}")
    house.held.clear()


def test_a_key_that_asks_too_often_is_told_when_it_may_again(make_house: Any) -> None:
    with make_house(api_keys=(DIGEST,), max_rate_per_key=2) as house:
        assert [post(house, "a cat").status_code for _ in range(2)] == [200, 200]
        refused = post(house, "a cat")
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["type"] == "rate_limit_error"


def images(house: Any, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return asking.post(f"{house.url}/v1/images/generations", json={"prompt": "a cat", **fields}, headers=headers)


@pytest.mark.parametrize(
    "limit", [{"max_concurrency_per_key": 5}, {"max_rate_per_key": 5}, {"max_live_requests": 5}], ids=str
)
def test_more_images_than_may_ever_be_at_once_are_refused_before_the_first(
    make_house: Any, limit: dict[str, int]
) -> None:
    """Symptom: five were begun and thrown away, and the client was told to come again, for ever."""
    with make_house(accepts=schema(with_count=False), api_keys=(DIGEST,), **limit) as house:
        refused = images(house, n=6)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"
        assert "5 are taken at once" in refused.json()["error"]["message"]
        assert house.seen == []
        assert images(house, n=5).status_code == 200


def test_images_begin_together_or_not_at_all(make_house: Any) -> None:
    with make_house(accepts=schema(with_count=False), api_keys=(DIGEST,), max_concurrency_per_key=5) as house:
        job = post(house, "slow").json()["id"]
        until(lambda: house.held)
        refused = images(house, n=5)
        assert (refused.status_code, len(house.seen)) == (429, 1)
        assert images(house, n=4).status_code == 200
        asking.delete(f"{house.url}/v1/videos/{job}", headers={"authorization": f"Bearer {KEY}"})
