"""What every HTTP request passes first and last: its id, the limit on its body, the count of its answer."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.api.errors import CLIENT_CLOSED, BodyStalled, BodyTooLarge, error_response, typed_response
from triptych.api.room import SHARE, Room, Share
from triptych.errors import NotReady
from triptych.server.notices import CAUSE

log = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""Longest silence in the middle of a request body."""
SLOWEST = 2048
"""Bytes of a body per second; below that, on the whole and after the first `STALL_SECONDS`, it is given up."""

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Counts answers by route template, so that ids never become label values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("route", "method", "status")
        self._requests = Counter("triptych_http_requests", "HTTP requests answered.", labels, registry=registry)
        self._seconds = Histogram(
            "triptych_http_request_seconds",
            "Seconds from a request's head to the end of its answer.",
            ("route",),
            registry=registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0),
        )

    def record(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one answer."""
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


class Gate:
    """ASGI middleware around the whole application.

    An exception that nobody mapped fails exactly its own request: status 500, logged with the request id, nothing of
    it shown to the client.
    """

    def __init__(self, app: ASGIApp, *, max_body: int, room: Room, metrics: HttpMetrics) -> None:
        self._app = app
        self._max_body = max_body
        self._room = room
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        wanted = headers.get("x-request-id", "")
        request_id = wanted if _SANE_ID.fullmatch(wanted) else f"req_{secrets.token_hex(12)}"
        CAUSE.set(request_id)
        begun = time.monotonic()
        status = 0

        async def labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        share = scope[SHARE] = self._room.share()
        try:
            await self._answer(scope, headers, share, receive, labelled)
        except ClientDisconnect:
            status = status or CLIENT_CLOSED
            log.info("request %s: the client hung up before it was answered", request_id)
        except asyncio.CancelledError:  # the server stops, and has waited for this as long as it does
            log.info("request %s: the server stopped before it was answered", request_id)
            if not status:
                await typed_response(NotReady("the server is stopping: send the request again"))(
                    scope, receive, labelled
                )
        except Exception:
            log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if status:
                raise  # the head is out; only cutting the connection tells the client
            response = error_response(500, f"internal error; quote request id {request_id}", code="internal_error")
            await response(scope, receive, labelled)
        finally:
            share.close()
            self._metrics.record(scope, status, time.monotonic() - begun)

    async def _answer(self, scope: Scope, headers: Headers, share: Share, receive: Receive, send: Send) -> None:
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 15 or int(length) > self._max_body):
            await typed_response(self._too_large(length))(scope, receive, send)
            return
        taken, whole, begun = 0, False, time.monotonic()

        async def limited() -> Message:
            nonlocal taken, whole
            try:
                # Once the body is there, what comes is the client's hanging up, and that may take as long as it likes.
                due = begun + STALL_SECONDS + taken / SLOWEST
                patience = min(STALL_SECONDS, due - time.monotonic())
                message = await asyncio.wait_for(receive(), None if whole else patience)
            except TimeoutError as error:
                raise BodyStalled(None, _slow(taken, time.monotonic() - begun)) from error
            if message["type"] == "http.request":
                whole = not message.get("more_body", False)
                taken += len(message.get("body", b""))
                if taken > self._max_body:
                    raise self._too_large(f"more than {self._max_body}")
                share.take(len(message.get("body", b"")))
            return message

        await self._app(scope, limited, send)

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(None, f"the request body has {size[:20]} bytes; at most {self._max_body} are accepted")


def _slow(taken: int, seconds: float) -> str:
    return (
        f"{taken} bytes of the body came in {seconds:.3g} seconds; accepted are pauses of {STALL_SECONDS:g} seconds, "
        f"and on the whole {SLOWEST} bytes per second"
    )
