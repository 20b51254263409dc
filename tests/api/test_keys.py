"""API keys: who is let in, what an outsider sees, and how much one key may have under way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests import asking
from triptych.client import Client, RequestRefused
from triptych.config import ServerConfig
from triptych.errors import ConfigError
from triptych.launch.ports import free_ports

KEYS = ("first-secret-key", "second-secret-key")
DIGESTS = tuple("sha256:" + hashlib.sha256(key.encode()).hexdigest() for key in KEYS)


@pytest.fixture(scope="module")
def guarded(make_house: Callable[..., Any]) -> Iterator[Any]:
    """A live server with two keys, each good for two requests at once."""
    with make_house(api_keys=DIGESTS, max_concurrency_per_key=2) as house:
        yield house


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_port_for_metrics_needs_no_key_and_opens_nothing_else(make_house: Callable[..., Any]) -> None:
    port = free_ports(1)[0]
    with make_house(api_keys=DIGESTS, metrics_port=port):
        assert "triptych_requests_ended_total" in asking.get(f"http://127.0.0.1:{port}/metrics").text
        assert asking.get(f"http://127.0.0.1:{port}/ready").status_code in (200, 503)
        for headers in ({}, bearer(KEYS[0])):
            answer = asking.post(f"http://127.0.0.1:{port}/v1/videos", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 404


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens_the_door(guarded: Any, key: str) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as sdk:
        assert sdk.models.list().data[0].id == "/models/painter"
    with Client(guarded.url, api_key=key) as client:
        assert client.generate("a cat").read() == guarded.clip


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        bearer("wrong-secret-key"),
        bearer(KEYS[0] + "x"),
        bearer(KEYS[0][:-1]),
        bearer(DIGESTS[0]),  # who sees the digest has no key
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": KEYS[0]},
        {"authorization": "Bearer caf\xe9-secret-key"},
    ],
)
def test_an_outsider_is_refused_in_openais_form(guarded: Any, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/videos"), ("GET", "/metrics"), ("GET", "/nothing")):
        response = asking.request(method, guarded.url + path, headers=encoded)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_sdk_and_the_client_tell_a_wrong_key(guarded: Any) -> None:
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong-secret-key", max_retries=0) as sdk,
        pytest.raises(openai.AuthenticationError),
    ):
        sdk.models.list()
    with Client(guarded.url) as client, pytest.raises(RequestRefused, match="an API key is needed"):
        client.models()


def test_health_and_readiness_are_open_but_reasons_are_not(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asking.get(f"{guarded.url}/health").status_code == 200
    assert asking.get(f"{guarded.url}/ready").json() == {"ready": True, "reasons": []}
    reasons = guarded.service.readiness().__class__(ready=False, reasons=("tcp://10.0.0.9:19000 is missing",))
    monkeypatch.setattr(guarded.service, "readiness", lambda: reasons)
    outside = asking.get(f"{guarded.url}/ready")
    assert outside.status_code == 503
    assert "10.0.0.9" not in outside.text
    assert "10.0.0.9" in asking.get(f"{guarded.url}/ready", headers=bearer(KEYS[0])).text


def test_a_key_has_only_so_much_under_way(guarded: Any) -> None:
    with (
        httpx.Client(base_url=guarded.url, timeout=60, headers=bearer(KEYS[0])) as first,
        httpx.Client(base_url=guarded.url, timeout=60, headers=bearer(KEYS[1])) as second,
    ):
        jobs = [first.post("/v1/videos", json={"prompt": f"slow {i}"}).json()["id"] for i in range(2)]
        refused = first.post("/v1/videos", json={"prompt": "slow"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "too_busy")
        assert first.post("/v1/tasks/video/", json={"prompt": "a cat"}).status_code == 429
        other = second.post("/v1/videos", json={"prompt": "slow"})
        assert other.status_code == 200
        first.delete(f"/v1/videos/{jobs[0]}")
        assert first.post("/v1/videos", json={"prompt": "a cat"}).status_code == 200
        second.delete(f"/v1/videos/{other.json()['id']}")
        first.delete(f"/v1/videos/{jobs[1]}")
    guarded.held.clear()


def test_the_document_says_that_a_key_is_needed(guarded: Any) -> None:
    document = asking.get(f"{guarded.url}/openapi.json", headers=bearer(KEYS[0])).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert "401" in document["paths"]["/v1/videos"]["post"]["responses"]
    assert "security" not in document["paths"]["/health"]["get"]


def test_no_answer_and_no_record_holds_a_key(guarded: Any) -> None:
    headers = bearer(KEYS[0])
    job = asking.post(f"{guarded.url}/v1/videos", json={"prompt": "a cat"}, headers=headers).json()["id"]
    record = guarded.service.get(job)
    assert KEYS[0] not in repr(record)
    for path in ("/server_info", "/metrics", f"/v1/videos/{job}"):
        text = asking.get(guarded.url + path, headers=headers).text
        assert KEYS[0] not in text
        assert DIGESTS[0] not in text


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="digest"):
        ServerConfig(api_keys=("plain-text-key",))
    with pytest.raises(ConfigError, match="needs --api-key"):
        ServerConfig(max_concurrency_per_key=2)
