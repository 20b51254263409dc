"""The Idempotency-Key header: a client that heard no answer may send its request again and start no second job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from starlette.requests import Request

from triptych.api.keys import CALLER
from triptych.errors import BadRequest
from triptych.server.idempotency import IdempotencyKey

HEADER = "idempotency-key"

_LONG: Final = 4096
"""Characters of a text that its digest stands for where values are written down to be compared."""
_DEEP: Final = 4
"""Where pictures can stand: {"image": [{"image_url": {"url": ...}}]}."""


def has_key(request: Request) -> bool:
    """Whether a request has an Idempotency-Key."""
    return HEADER in request.headers


def remember_body(request: Request, fields: Mapping[str, Any], uploads: Mapping[str, Sequence[bytes]]) -> None:
    """Note what a request with a key asks for, as it was sent: defaults and drawn seeds are not the client's words.

    It takes as long as hashing every byte does, so call it in a thread. Raises `BadRequest`.
    """
    digest = hashlib.sha256(request.url.path.encode())
    digest.update(canonical(fields))
    for name in sorted(uploads):
        for data in uploads[name]:
            digest.update(f"\0{name}\0{len(data)}\0".encode())
            digest.update(data)
    request.state.body_digest = digest.hexdigest()


def canonical(value: Any) -> bytes:
    """A JSON value as bytes that are equal for equal values. Raises `BadRequest` for one that is nested too deeply."""
    try:
        return json.dumps(_brief(value, _DEEP), sort_keys=True).encode()
    except RecursionError as error:
        raise BadRequest(None, "the body is nested too deeply", code="bad_json") from error


def _brief(value: Any, depth: int) -> Any:
    """``value`` with digests for long texts: they are hashed without the interpreter's lock, and quoted with it."""
    match value:
        case str() if len(value) > _LONG:
            return {"sha256": hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()}
        case dict() if depth:
            pairs = cast("dict[str, Any]", value).items()
            return {name: _brief(entry, depth - 1) for name, entry in pairs}
        case list() if depth:
            return [_brief(entry, depth - 1) for entry in cast("list[Any]", value)]
        case _:
            return value


def key_of(request: Request, part: int = 0) -> IdempotencyKey | None:
    """The key of a request whose body was read, or None; ``part`` counts the jobs that one request makes.

    Raises `BadRequest` for a key that is none.
    """
    value = request.headers.get(HEADER)
    digest: str | None = getattr(request.state, "body_digest", None)
    if value is None or digest is None:
        return None
    owner = request.scope.get(CALLER) or ""
    return IdempotencyKey(value, digest, owner, part)
