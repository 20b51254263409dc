"""Asks a server whether it is ready."""

from __future__ import annotations

from triptych.client import Client, ClientTimeout, RequestRefused, ServerUnreachable

UNTOLD = "the server is not ready; it says why to who has an API key, at /ready, and in its log"
"""Where the server has keys and the one who asks has none."""


def probe(url: str) -> str | None:
    """None when the server at ``url`` is ready, else what is missing; an empty string when nothing answers there."""
    with Client(url) as client:
        try:
            ready, reasons = client.readiness()
        except (ServerUnreachable, ClientTimeout):
            return ""
        except RequestRefused as error:
            return error.message
    return None if ready else "; ".join(reasons) or UNTOLD
