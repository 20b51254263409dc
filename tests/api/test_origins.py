"""Pages of other sites, in a browser on the machine of the server: they start, stop and read nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests import asking
from triptych.config import KEY_PREFIX

KEY = "a-key-of-the-tests"
DIGEST = KEY_PREFIX + hashlib.sha256(KEY.encode()).hexdigest()
NAME = "pictures.example"


@pytest.fixture(scope="module")
def named(make_house: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """A server on loopback behind a proxy of that name."""
    with make_house(allowed_hosts=(NAME,)) as house:
        yield house


def submit(house: Any, **headers: str) -> httpx.Response:
    """A form, as any page may send it to anybody."""
    said = {name.replace("_", "-"): value for name, value in headers.items()}
    return asking.post(f"{house.url}/v1/videos", files={"prompt": (None, "a cat")}, headers=said)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "null"},
        {"origin": "http://[::1"},
        {"origin": "http://localhost:1", "host": "localhost:2"},
        {"origin": "http://localhost:1", "host": "localhost:2", "sec_fetch_site": "same-site"},
        {"origin": "http://localhost", "host": "localhost:8080"},
    ],
    ids=str,
)
def test_a_page_of_another_origin_starts_nothing(house: Any, headers: dict[str, str]) -> None:
    """Symptom: any page that an operator looked at could start jobs on his server."""
    seen = len(house.seen)
    refused = submit(house, **headers)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "foreign_page"
    assert len(house.seen) == seen


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_nor_does_it_stop_or_pause_anything(house: Any, method: str) -> None:
    job = submit(house).json()["id"]
    path = f"/v1/videos/{job}" + ("/pause" if method == "POST" else "")
    refused = asking.request(method, house.url + path, headers={"origin": "http://evil.example"})
    assert refused.status_code == 403
    assert asking.get(f"{house.url}/v1/videos/{job}").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:9", "origin": "http://localhost:9"},
        {"host": "localhost", "origin": "http://localhost"},
        {"host": "127.0.0.1:9", "origin": "http://127.0.0.1:9", "sec_fetch_site": "same-origin"},
        {"host": "127.0.0.1:9", "origin": "https://pictures.test", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"host": "127.0.0.1", "origin": "https://127.0.0.1"},
        {"host": "10.0.0.7:30000"},
        {"host": "[::1]:30000", "origin": "http://[::1]:30000"},
        {"host": "host.docker.internal:30000"},
        {"host": "triptych.localhost"},
        {"host": "LOCALHOST.:30000"},
    ],
    ids=str,
)
def test_clients_and_the_server_s_own_pages_are_let_in(house: Any, headers: dict[str, str]) -> None:
    """Whatever is no browser sends no Origin; proxies put an address in Host, or hand on the browser's word."""
    assert submit(house, **headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil", "a b"]
)
def test_a_name_that_was_pointed_at_this_machine_reads_nothing(house: Any, host: str) -> None:
    for path in ("/v1/videos", "/metrics", "/openapi.json", "/server_info"):
        refused = asking.get(house.url + path, headers={"host": host})
        assert refused.status_code == 403
        assert "--allowed-hosts" in refused.json()["error"]["message"]
    assert asking.get(f"{house.url}/health", headers={"host": host}).status_code == 200


def test_a_name_that_the_operator_gave_is_the_server_s_own(named: Any) -> None:
    assert asking.get(f"{named.url}/v1/videos", headers={"host": NAME}).status_code == 200
    assert asking.get(f"{named.url}/v1/videos", headers={"host": f"www.{NAME}"}).status_code == 403
    assert submit(named, host=NAME, origin=f"https://{NAME}").status_code == 200
    assert submit(named, host="127.0.0.1:30000", origin=f"https://{NAME}").status_code == 200  # the proxy's own Host
    assert submit(named, host=NAME, origin="https://evil.example").status_code == 403


def test_an_operator_may_let_everybody_in(make_house: Callable[..., AbstractContextManager[Any]]) -> None:
    with make_house(allowed_hosts=("*",)) as house:
        assert submit(house, host="any.example", origin="http://evil.example").status_code == 200


def test_who_has_a_key_may_come_from_anywhere(make_house: Callable[..., AbstractContextManager[Any]]) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    with make_house(api_keys=(DIGEST,)) as house:
        assert submit(house, host="any.example", origin="http://other.example", **key).status_code == 200
        assert submit(house, origin="http://evil.example").status_code == 401
    with make_house(api_keys=(DIGEST,), allowed_hosts=(NAME,)) as house:
        assert submit(house, host=NAME, origin="http://other.example", **key).status_code == 200
        assert submit(house, host="other.example", **key).status_code == 403
