"""Asks a server whether it is ready."""

from __future__ import annotations

from typing import Any


def probe(url: str) -> str | None:
    """None when the server at ``url`` is ready, else what is missing."""
    import httpx

    try:
        # No proxy from the environment: the server is a process of this machine.
        answer = httpx.get(f"{url}/ready", timeout=5.0, trust_env=False)
    except httpx.TransportError as error:
        return f"no answer ({type(error).__name__})"
    if answer.status_code == 200:
        return None
    try:
        body: Any = answer.json()
        return "; ".join(body["reasons"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"
