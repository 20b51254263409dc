"""What operators and load balancers ask: alive, ready, which model, what state, which numbers."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from triptych.api.errors import RETRY_SECONDS, ModelNotFound, error_type
from triptych.api.keys import CALLER
from triptych.api.routes import STRICT, errors
from triptych.api.shapes import ErrorObject, Health, ModelList, NotReadyBody, Ready, ServedModel
from triptych.errors import NotReady
from triptych.server.service import DiffusionService
from triptych.wire.schema import Param, RequestSchema


class Operations:
    """The endpoints that make no media."""

    def __init__(self, service: DiffusionService, *, keys: bool) -> None:
        self._service = service
        self._keys = keys
        self._created = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(
            "/v1/models", self.models, methods=["GET"], summary="The served models", responses=errors(400, 500),
            dependencies=STRICT, tags=["models"],
        )  # fmt: skip
        app.add_api_route(
            "/v1/models/{name:path}", self.model, methods=["GET"], summary="One served model",
            responses=errors(400, 404, 500), dependencies=STRICT, tags=["models"],
        )  # fmt: skip
        app.add_api_route(
            "/health", self.health, methods=["GET"], summary="Whether the process answers", tags=["operations"]
        )
        app.add_api_route(
            "/ready",
            self.ready,
            methods=["GET"],
            summary="Whether requests are served",
            response_model=Ready,
            responses={503: {"model": NotReadyBody, "description": "Not ready, for these reasons."}},
            tags=["operations"],
        )
        app.add_api_route(
            "/metrics",
            self.metrics,
            methods=["GET"],
            summary="Numbers in Prometheus' text format",
            response_class=Response,
            responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
            tags=["operations"],
        )
        app.add_api_route(
            "/server_info", self.server_info, methods=["GET"], summary="Roles, instances and queues",
            tags=["operations"],
        )  # fmt: skip

    async def models(self) -> ModelList:
        """The served model; an empty list until an instance has told it."""
        schema = self._service.schema()
        return ModelList(data=[] if schema is None else [self._describe(schema)])

    async def model(self, name: str) -> ServedModel:
        """The served model under any of its names."""
        schema = self._service.schema()
        names = () if schema is None else schema.names
        if schema is None or name not in names:
            served = ", ".join(names) or "none yet"
            raise ModelNotFound("model", f"model {name[:60]!r} is not served here; served: {served}")
        return self._describe(schema)

    async def health(self) -> Health:
        """Answers as long as the process does."""
        return Health()

    async def ready(self, request: Request) -> Response:
        """200 when every role has an instance and all that were named have come once, 503 otherwise. Reasons say what
        is missing or in doubt, with 200 what can be done without; they are for who has a key."""
        readiness = self._service.readiness()
        reasons = list(readiness.reasons) if self._shows(request) else []
        if readiness.ready:
            return JSONResponse(Ready(reasons=reasons).model_dump())
        error = ErrorObject(
            message=": ".join(["not ready", *(["; ".join(reasons)] if reasons else [])]),
            type=error_type(503),
            param=None,
            code=NotReady.code,
        )
        body = NotReadyBody(reasons=reasons, error=error)
        return JSONResponse(body.model_dump(), status_code=503, headers={"retry-after": RETRY_SECONDS})

    async def metrics(self) -> Response:
        """All metrics of the server."""
        return Response(generate_latest(self._service.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def server_info(self) -> dict[str, Any]:
        """The server's own view of itself."""
        return self._service.info()

    def _shows(self, request: Request) -> bool:
        return not self._keys or CALLER in request.scope

    def _describe(self, schema: RequestSchema) -> ServedModel:
        names = schema.names
        return ServedModel(
            id=names[0],
            created=self._created,
            owned_by="triptych",
            aliases=list(names[1:]),
            pipeline=schema.pipeline,
            task=schema.task,
            output=schema.output,
            parameters=[_shown(param) for param in schema.params],
        )


def _shown(param: Param) -> dict[str, Any]:
    """A parameter as clients see it, whom it does not concern how instances were launched."""
    fields: dict[str, Any] = msgspec.to_builtins(param)
    return {name: value for name, value in fields.items() if name != "option"}
