"""The ports that are for monitoring only: what they answer, to whoever may reach them."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api.errors import error_response

ANSWERED: Final = ("/metrics", "/health", "/ready")

MONITORING: Final = "triptych.monitoring"
"""Entry of an ASGI scope: the request came to a port for monitoring, and for something that is answered there."""


class MetricsPorts:
    """ASGI middleware that answers nothing but `ANSWERED` on ``ports``, where no key is needed.

    Whoever watches should hold no key that could start jobs, and whoever is let into the monitoring network is not let
    into the API by that.
    """

    def __init__(self, app: ASGIApp, *, ports: frozenset[int]) -> None:
        self._app = app
        self._ports = ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] == "http" and (scope.get("server") or ("", 0))[1] in self._ports:
            if scope["path"] not in ANSWERED:
                message = f"this port answers {', '.join(ANSWERED)} only; the API has ports of its own"
                await error_response(404, message, code="metrics_port")(scope, receive, send)
                return
            scope[MONITORING] = True
        await self._app(scope, receive, send)
