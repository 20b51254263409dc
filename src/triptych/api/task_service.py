"""How full the server is and what it serves, in the Task API's words."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI

import triptych
from triptych.api.context import Context
from triptych.api.routes import STRICT, errors
from triptych.api.task_book import state_of, task_id_of
from triptych.api.task_shapes import QueueStatus, ServiceMetadata, ServiceStatus
from triptych.core.events import JobState
from triptych.server.records import JobRecord

_FAILED: Final = (JobState.FAILED, JobState.TIMED_OUT)


class TaskService:
    """The endpoints that speak of all tasks at once."""

    def __init__(self, context: Context) -> None:
        self._service = context.service
        self._size = context.config.max_live_requests

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, handler, summary in (
            ("/v1/tasks/queue/status", self.queue, "How full the queue is"),
            ("/v1/service/status", self.status, "What the server is doing"),
            ("/v1/service/metadata", self.metadata, "Which model is served"),
        ):
            app.add_api_route(
                path,
                handler,
                methods=["GET"],
                summary=summary,
                responses=errors(400, 500),
                dependencies=STRICT,
                tags=["tasks"],
            )

    async def queue(self) -> QueueStatus:
        """Pending and running tasks against the most that are taken."""
        live = self._service.live()
        running = _running(live)
        return QueueStatus(
            is_processing=bool(running),
            current_task=running[0] if running else None,
            pending_count=len(live) - len(running),
            active_count=len(live),
            queue_size=self._size,
            queue_available=max(0, self._size - len(live)),
        )

    async def status(self) -> ServiceStatus:
        """Busy or idle, with the counts of the tasks that are remembered."""
        live = self._service.live()
        running = _running(live)
        states = self._service.states()
        return ServiceStatus(
            service_status="busy" if running else "idle",
            current_task=running[0] if running else None,
            active_tasks=running,
            pending_tasks=len(live) - len(running),
            queue_size=self._size,
            total_tasks=sum(states.values()),
            completed_tasks=states[JobState.DONE],
            failed_tasks=sum(states[state] for state in _FAILED),
        )

    async def metadata(self) -> ServiceMetadata:
        """The served model."""
        schema = self._service.schema()
        return ServiceMetadata(
            model_path=None if schema is None else schema.model,
            model_cls=None if schema is None else schema.pipeline,
            task=None if schema is None else schema.task,
            output=None if schema is None else schema.output,
            version=triptych.__version__,
        )


def _running(live: list[JobRecord]) -> list[str]:
    """Ids of the tasks that run, the one that runs longest first. Paused ones do not."""
    running = [record for record in live if state_of(record) == "processing" and not record.view.paused]
    return [task_id_of(record) for record in sorted(running, key=lambda record: record.started_at or 0.0)]
