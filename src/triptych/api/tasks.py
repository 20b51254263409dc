"""The endpoints of the Task API: create tasks, look at them, follow, fetch and stop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query, Request
from starlette.responses import FileResponse, Response

from triptych.api.context import Context
from triptych.api.errors import CLIENT_CLOSED, DeadlinePassed, NoContent
from triptych.api.events import EVENTS_RESPONSE, EventStream
from triptych.api.files import media_response
from triptych.api.idempotency import HEADER
from triptych.api.routes import STRICT, errors
from triptych.api.task_book import TaskBook, paths_of, task_id_of
from triptych.api.task_events import follow_ticket
from triptych.api.task_shapes import TaskCreated, TaskFiles, TaskStatus, TaskStopped
from triptych.api.tickets import Ticket
from triptych.api.videos import CREATE_STATUSES
from triptych.api.waiting import Waiting
from triptych.errors import NotReady
from triptych.server.records import JobRecord

SYNC_SECONDS: Final = 600


class Tasks:
    """Everything under /v1/tasks but the queue. Paths are accepted with and without a slash at their end."""

    def __init__(self, context: Context, book: TaskBook) -> None:
        self._context = context
        self._book = book
        self._waiting = Waiting(context.service, context.events.stopping)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        created = (*CREATE_STATUSES, 409)
        self._add(app, "/v1/tasks/video/", self.create_video, "POST", "Start a video task", created)
        self._add(app, "/v1/tasks/video/form", self.create_video, "POST", "The same, with uploads", created)
        self._add(app, "/v1/tasks/image/", self.create_image, "POST", "Start an image task", created)
        self._add(app, "/v1/tasks/image/form", self.create_image, "POST", "The same, with uploads", created)
        self._add(
            app, "/v1/tasks/image/sync", self.create_image_sync, "POST", "Make an image and wait for it",
            (*created, 422, 504), response_class=FileResponse,
        )  # fmt: skip
        self._add(app, "/v1/tasks/", self.all, "GET", "All tasks by id", (400, 500))
        self._add(app, "/v1/tasks/{task_id}/status", self.status, "GET", "Look at a task", (400, 404, 500))
        self._add(
            app, "/v1/tasks/{task_id}/result", self.result, "GET", "Download what a task made", (400, 404, 416, 500),
            response_class=FileResponse,
        )  # fmt: skip
        for path in ("/v1/tasks/{task_id}/result", "/v1/tasks/{task_id}/result/"):
            app.add_api_route(path, self.result, methods=["HEAD"], include_in_schema=False, dependencies=STRICT)
        self._add(app, "/v1/tasks/{task_id}/files", self.files, "GET", "List what a task made", (400, 404, 500))
        self._add(
            app, "/v1/tasks/{task_id}/events", self.events, "GET", "Follow a task as server-sent events",
            (400, 404, 500), response_class=Response, extra={200: EVENTS_RESPONSE},
        )  # fmt: skip
        self._add(app, "/v1/tasks/{task_id}", self.stop, "DELETE", "Cancel a task", (400, 404, 500, 503))

    def _add(
        self,
        app: FastAPI,
        path: str,
        handler: Callable[..., Any],
        method: str,
        summary: str,
        statuses: tuple[int, ...],
        *,
        extra: dict[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        options |= {"methods": [method], "summary": summary, "dependencies": STRICT, "tags": ["tasks"]}
        app.add_api_route(path, handler, responses={**(extra or {}), **errors(*statuses)}, **options)
        twin = path[:-1] if path.endswith("/") else f"{path}/"
        app.add_api_route(twin, handler, include_in_schema=False, **options)

    async def create_video(self, request: Request) -> TaskCreated:
        """Start a task; the answer comes at once."""
        return await self._book.create(request, "video")

    async def create_image(self, request: Request) -> TaskCreated:
        """Start a task; the answer comes at once."""
        return await self._book.create(request, "image")

    async def create_image_sync(
        self,
        request: Request,
        timeout_seconds: Annotated[
            int, Query(ge=1, le=86_400, description="Then the task is cancelled.")
        ] = SYNC_SECONDS,
        poll_interval_seconds: Annotated[
            float, Query(gt=0, le=3600, description="Without effect: the answer comes at once when it is there.")
        ] = 0.5,
    ) -> Response:
        """The image itself. A client that hangs up stops the work, unless the same request waits elsewhere too."""
        record = await self._book.start(request, "image")
        place = self._waiting.join(record)
        try:
            ended = await self._waiting.outcome(request, [record], timeout_seconds)
            if ended is None:
                if place.leave():
                    await self._waiting.forget(record.id)
                return Response(status_code=CLIENT_CLOSED)
            place.keep()
        except DeadlinePassed:
            if place.leave():
                await self._context.service.cancel(record.id)
            raise
        except NotReady:  # the server stops: who can name the task finds it again
            if place.leave() and HEADER not in request.headers and task_id_of(record) == record.id:
                await self._waiting.forget(record.id)
            raise
        finally:
            place.leave()
        await self._context.service.saved.ensure(record.id)
        return await media_response(request, self._context.service, ended[0].files[0], "inline")

    async def all(self) -> dict[str, TaskStatus]:
        """Every remembered task, the newest thousand of each kind."""
        return await self._book.all()

    async def status(self, task_id: str) -> TaskStatus:
        """The task as it is now."""
        return await self._book.status(self._book.find(task_id))

    async def result(self, request: Request, task_id: str) -> Response:
        """The finished file, the first if there are several, whole or in byte ranges."""
        record = await self._made(task_id)
        place = paths_of(record)[0]
        return await media_response(request, self._context.service, record.files[0], "attachment", place=place)

    async def files(self, task_id: str) -> TaskFiles:
        """Where everything lies that the task made: several images, or the layers of one."""
        record = await self._made(task_id)
        await self._context.service.saved.ensure(record.id)
        return TaskFiles(task_id=task_id, files=paths_of(record))

    async def _made(self, task_id: str) -> JobRecord:
        task = self._book.find(task_id)
        if isinstance(task, Ticket) or not task.ended or not task.files:
            status = await self._book.status(task)
            why = f": {status.error}" if status.error else ""
            raise NoContent("task_id", f"task {status.task_id} is {status.status} and has no result{why}")
        return task

    async def events(self, task_id: str) -> EventStream:
        """The task from now until its end: events queued, stage, step, done and failed."""
        task = self._book.find(task_id)
        if isinstance(task, Ticket):
            return EventStream(follow_ticket(self._context, self._book, task))
        return self._context.events.respond(task, task_id)

    async def stop(self, task_id: str) -> TaskStopped:
        """Stop the task within one denoising step; it stays in the list as cancelled."""
        if await self._book.stop(self._book.find(task_id)):
            return TaskStopped(stop_status="success", reason="Task stopped successfully.")
        return TaskStopped(stop_status="do_nothing", reason="The task has ended already.")
