"""A proxy with TLS before the server: addresses that clients are told are https, if the operator named the proxy."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

PROXY = "127.0.0.2"


def told(house: Any) -> str:
    """Where a client that comes through a proxy of that address is told to fetch its image."""
    headers = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.7", "host": "pictures.example"}
    with httpx.Client(transport=httpx.HTTPTransport(local_address=PROXY), timeout=60) as http:
        answer = http.post(f"{house.url}/v1/images/generations", json={"prompt": "a cat"}, headers=headers)
    return answer.json()["data"][0]["url"]


@pytest.mark.parametrize(("said", "scheme"), [(None, "http"), (f"10.0.0.0/8,{PROXY}", "https"), ("10.0.0.0/8", "http")])
def test_only_a_proxy_that_was_named_is_believed(
    make_house: Any, monkeypatch: pytest.MonkeyPatch, said: str | None, scheme: str
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    with make_house(forwarded_allow_ips=said, allowed_hosts=("pictures.example",)) as house:
        assert told(house).startswith(f"{scheme}://pictures.example/v1/files/image_")


def test_the_variable_that_uvicorn_knows_counts_too(make_house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.0/8")
    with make_house(allowed_hosts=("pictures.example",)) as house:
        assert told(house).startswith("https://")
