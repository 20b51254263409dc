"""Puts the HTTP door together: gate, endpoints, errors, OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

import triptych
from triptych.api import errors
from triptych.api.desk import Desk
from triptych.api.files import Files
from triptych.api.gate import Gate, HttpMetrics
from triptych.api.images import ImageRoutes
from triptych.api.openapi import describe
from triptych.api.operations import Operations
from triptych.api.videos import Videos
from triptych.config import ServerConfig
from triptych.server.service import DiffusionService


def create_app(service: DiffusionService, config: ServerConfig) -> FastAPI:
    """The HTTP application over ``service``, which its owner starts and closes.

    No page is served that would load anything from another host, and no origin is allowed besides the server's own.
    """
    app = FastAPI(
        title="Triptych",
        version=triptych.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Gate, max_body=config.max_upload_bytes, metrics=HttpMetrics(service.registry))
    errors.install(app)
    desk = Desk(service, config)
    Videos(service, config, desk).add_to(app)
    ImageRoutes(service, config, desk).add_to(app)
    Files(service).add_to(app)
    Operations(service).add_to(app)

    def openapi() -> dict[str, Any]:
        return describe(app, service.schema())

    app.openapi = openapi
    return app
