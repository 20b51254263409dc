"""Idempotency keys: the same order handed in twice under one key is one job."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from triptych.errors import BadRequest
from triptych.ids import RequestId

LONGEST_KEY = 255
"""Characters."""


class KeyReused(BadRequest):
    """A client's idempotency key stands for another order already."""

    status = 409
    code = "idempotency_key_reused"


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """What the client calls its order, and a digest of what it asked for, as it was sent."""

    value: str
    digest: str
    owner: str = ""
    """Whose key it is: the same word of another client is another key."""
    part: int = 0
    """Which of the jobs that one request makes."""

    def __post_init__(self) -> None:
        if not 0 < len(self.value) <= LONGEST_KEY or not self.value.isprintable():
            shown = f"{self.value[:40]!r} ({len(self.value)} characters)"
            raise BadRequest("Idempotency-Key", f"Idempotency-Key={shown}: must be 1 to {LONGEST_KEY} printable ones")

    @property
    def name(self) -> str:
        """What is remembered of the key: a client may have put a secret into it."""
        part = f"\0{self.part}" if self.part else ""  # a key has no NUL: it is printable
        return hashlib.sha256(f"{self.owner}\0{self.value}{part}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Claim:
    digest: str
    job: asyncio.Future[RequestId]


class Keys:
    """Which job each key stands for, for as long as that job is remembered."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def remember(self, name: str, digest: str, request: RequestId) -> None:
        """A key of an earlier life."""
        job: asyncio.Future[RequestId] = asyncio.get_running_loop().create_future()
        job.set_result(request)
        self._claims[name] = _Claim(digest, job)

    def forget(self, name: str, request: RequestId) -> None:
        """A job is gone, and its key is free, unless it stands for a later job already."""
        claim = self._claims.get(name)
        if claim is not None and _succeeded(claim.job) and claim.job.result() == request:
            del self._claims[name]

    async def once(self, key: IdempotencyKey, accept: Callable[[], Coroutine[Any, Any, RequestId]]) -> RequestId:
        """The job of ``key``, made by ``accept`` if there is none; those who come meanwhile wait for the same one.

        Raises `KeyReused` when the key stands for something else, and what ``accept`` raises; the key is free then.
        """
        known = await self.repeated(key)
        if known is not None:
            return known
        job = asyncio.ensure_future(accept())
        self._claims[key.name] = _Claim(key.digest, job)
        job.add_done_callback(lambda done: self._made(key.name, done))
        return await asyncio.shield(job)

    async def repeated(self, key: IdempotencyKey) -> RequestId | None:
        """The job that ``key`` stands for, or None. Raises `KeyReused`, and what refused a job that is being made."""
        claim = self._claims.get(key.name)
        if claim is None:
            return None
        if claim.digest != key.digest:
            raise KeyReused(
                "Idempotency-Key",
                f"Idempotency-Key={key.value[:40]!r}: was used for a request with other content; "
                "use a new key for a new request, and the same content to repeat one",
            )
        return await asyncio.shield(claim.job)

    def _made(self, name: str, job: asyncio.Future[RequestId]) -> None:
        if not _succeeded(job):
            self._claims.pop(name, None)


def _succeeded(job: asyncio.Future[RequestId]) -> bool:
    return job.done() and not job.cancelled() and job.exception() is None
