"""Who may speak to the server: API keys as bearer tokens, known only by their digests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api.errors import error_response
from triptych.api.metrics_port import MONITORING
from triptych.config import KEY_PREFIX

OPEN: Final = frozenset({"/health", "/ready"})
"""What load balancers ask without a key."""

CALLER: Final = "triptych.caller"
"""Entry of an ASGI scope that names the key of a request; absent where no keys are needed or given."""


def label_of(digest: str) -> str:
    """A short name of a key, fit for records: it tells keys apart and nobody what they are."""
    return digest.removeprefix(KEY_PREFIX)[:16]


class KeyGuard:
    """ASGI middleware that answers 401 unless a request carries one of the keys.

    Every digest is compared, each in constant time, so that an answer's time tells nothing of how close a guess was.
    """

    def __init__(self, app: ASGIApp, *, digests: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        caller = self._match(token.strip()) if scheme.lower() == "bearer" else None
        if caller is not None:
            scope[CALLER] = caller
        elif scope["path"] not in OPEN and MONITORING not in scope:
            what = "the API key is not one of this server's" if token else "an API key is needed"
            response = error_response(
                401,
                f"{what}: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _match(self, token: str) -> str | None:
        given = KEY_PREFIX + hashlib.sha256(token.encode("latin-1")).hexdigest()
        found: str | None = None
        for digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = label_of(digest)
        return found
