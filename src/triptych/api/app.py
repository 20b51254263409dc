"""Puts the HTTP door together: gate, endpoints, errors, OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

import triptych
from triptych.api import errors
from triptych.api.context import Context
from triptych.api.desk import Desk
from triptych.api.events import Events
from triptych.api.files import Files
from triptych.api.gate import Gate, HttpMetrics
from triptych.api.images import ImageRoutes
from triptych.api.keys import KeyGuard
from triptych.api.metrics_port import MetricsPorts
from triptych.api.openapi import describe
from triptych.api.operations import Operations
from triptych.api.origins import OriginGuard
from triptych.api.room import Room
from triptych.api.task_book import TaskBook
from triptych.api.task_service import TaskService
from triptych.api.tasks import Tasks
from triptych.api.timeouts import caps
from triptych.api.videos import Videos
from triptych.config import LOOPBACK, ServerConfig
from triptych.server.service import DiffusionService


def _never() -> bool:
    return False


def create_app(service: DiffusionService, config: ServerConfig, *, stopping: Callable[[], bool] = _never) -> FastAPI:
    """The HTTP application over ``service``, which its owner starts and closes.

    ``stopping`` says whether the server is about to end, so that streams end with it.
    No page is served that would load anything from another host, and no origin is allowed besides the server's own.
    """
    app = FastAPI(
        title="Triptych",
        version=triptych.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    if config.api_keys:
        app.add_middleware(KeyGuard, digests=config.api_keys)
    # Beyond loopback nobody can list the names by which others know this machine.
    unnamed = not config.allowed_hosts and (bool(config.api_keys) or config.host not in LOOPBACK)
    names = None if unnamed else (config.host, *config.allowed_hosts)
    app.add_middleware(OriginGuard, names=names, pages=not config.api_keys)
    app.add_middleware(MetricsPorts, ports=frozenset(config.monitoring_ports))
    room = Room(config.max_upload_memory, lambda: service.upload_bytes)
    app.add_middleware(Gate, max_body=config.max_upload_bytes, room=room, metrics=HttpMetrics(service.registry))
    errors.install(app)
    context = Context(
        service=service,
        config=config,
        desk=Desk(service, config),
        events=Events(service, stopping),
    )
    Videos(context).add_to(app)
    ImageRoutes(context).add_to(app)
    TaskService(context).add_to(app)  # before the tasks: /queue/status is no task
    Tasks(context, TaskBook(context)).add_to(app)
    Files(service).add_to(app)
    Operations(service, keys=bool(config.api_keys)).add_to(app)

    def openapi() -> dict[str, Any]:
        return describe(app, service.schema(), keys=bool(config.api_keys), timeouts=caps(config))

    app.openapi = openapi
    return app
