"""Keeps the pages of other sites, in browsers that reach this server, from starting and stopping jobs or reading them.

A browser sends a form to any address without asking it first, and a page whose host's name is pointed at another
address the second time it is looked up reads what answers there as its own. API keys stop both, since no page has one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api.errors import error_response
from triptych.api.keys import OPEN

ANY: Final = "*"
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; a browser shows their answers to no page of another origin."""
_OWN: Final = (".localhost", ".internal")
"""Ends of names that nobody can own on the internet."""
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class OriginGuard:
    """ASGI middleware that answers 403 to pages of other sites.

    ``names``: hosts that are this server besides addresses and localhost, `ANY` for all; None: whatever a request calls
    it. ``pages``: whether requests that change something are refused to pages of other hosts. What no browser sends
    has no Origin, and passes.
    """

    def __init__(self, app: ASGIApp, *, names: Collection[str] | None, pages: bool) -> None:
        self._app = app
        self._names = None if names is None or ANY in names else {name.lower().rstrip(".") for name in names}
        self._pages = pages and (names is None or ANY not in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or refuse."""
        if scope["type"] == "http" and (reason := self._objection(scope)) is not None:
            await error_response(403, reason, code="foreign_page")(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host and scope["path"] not in OPEN and not self._is_own(host):
            return (
                f"Host={host[:80]!r} is no name of this server, which is an address, localhost, or one that the "
                "operator has named (--allowed-hosts)"
            )
        if not self._pages or scope["method"] in SAFE:
            return None
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site in ("same-origin", "none") or (site is None and origin is None):
            return None
        if origin is not None and (_is_place_of(origin, host) or self._is_named(origin)):
            return None
        said = "a page of another site" if origin is None else f"Origin={origin[:80]!r}"
        return (
            f"{said} may change nothing here; the operator can name hosts whose pages may (--allowed-hosts), or have "
            "API keys"
        )

    def _is_own(self, host: str) -> bool:
        if self._names is None:
            return True
        place = _place(f"http://{host}")
        if place is None:
            return False
        name = place[0]
        return name == "localhost" or name.endswith(_OWN) or name in self._names or _is_address(name)

    def _is_named(self, origin: str) -> bool:
        place = _place(origin)
        return place is not None and self._names is not None and place[0] in self._names


def _place(url: str) -> tuple[str, int | None] | None:
    """Host and port of an origin; None for what is none, as the ``null`` of a page without one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.username is not None:
        return None
    return host.rstrip("."), _DEFAULT_PORTS.get(parts.scheme) if port is None else port


def _is_place_of(origin: str, host: str) -> bool:
    """Whether a Host header says where a page of ``origin`` comes from; its scheme is the proxy's matter."""
    place = _place(origin)
    return place is not None and place == _place(f"{origin.partition(':')[0]}://{host}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
