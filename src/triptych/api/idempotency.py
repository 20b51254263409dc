"""The Idempotency-Key header: a client that heard no answer may send its request again and start no second job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from triptych.api.keys import CALLER
from triptych.server.idempotency import LONGEST_KEY, IdempotencyKey

HEADER = "idempotency-key"


def remember_body(request: Request, fields: Mapping[str, Any], uploads: Mapping[str, Sequence[bytes]]) -> None:
    """Note what a request with a key asks for, as it was sent: defaults and drawn seeds are not the client's words."""
    if HEADER not in request.headers:
        return
    digest = hashlib.sha256(request.url.path.encode())
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(uploads):
        for data in uploads[name]:
            digest.update(f"\0{name}\0{len(data)}\0".encode())
            digest.update(data)
    request.state.body_digest = digest.hexdigest()


def key_of(request: Request, part: int = 0) -> IdempotencyKey | None:
    """The key of a request whose body was read, or None; ``part`` counts the jobs that one request makes.

    Raises `BadRequest` for a key that is none.
    """
    value = request.headers.get(HEADER)
    digest: str | None = getattr(request.state, "body_digest", None)
    if value is None or digest is None:
        return None
    owner = request.scope.get(CALLER) or ""
    whole = IdempotencyKey(value, digest, owner)
    return whole if part == 0 else IdempotencyKey(f"{value} {part}"[-LONGEST_KEY:], digest, owner)
