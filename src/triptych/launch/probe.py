"""Asks a server whether it is ready."""

from __future__ import annotations

from triptych.client import Client, ClientTimeout, RequestRefused, ServerUnreachable


def probe(url: str) -> str | None:
    """None when the server at ``url`` is ready, else what is missing; an empty string when nothing answers there."""
    with Client(url) as client:
        try:
            ready, reasons = client.readiness()
        except (ServerUnreachable, ClientTimeout):
            return ""
        except RequestRefused as error:
            return error.message
    return None if ready else "; ".join(reasons)
