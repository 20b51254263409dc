"""Tasks by id: from a post, or three, to a job; and what a task is at the moment, in the Task API's words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from anyio import to_thread
from starlette.requests import Request

from triptych.api.body import read_body
from triptych.api.context import Context
from triptych.api.errors import retry_seconds
from triptych.api.orders import Order, Output
from triptych.api.ready import need_schema
from triptych.api.task_orders import TaskFields, in_client_words, read_fields
from triptych.api.task_shapes import TaskCreated, TaskState, TaskStatus
from triptych.api.tickets import PARTS, Part, Reason, Ticket, Tickets, taken
from triptych.api.views import error_of
from triptych.core.events import JobState
from triptych.errors import BadRequest, NotFound, TriptychError
from triptych.ids import RequestId
from triptych.server.records import SAVE_PATH, TASK_ID, JobRecord
from triptych.server.saved import place_of

LISTED: Final = 1000
"""Most jobs of each kind in a list of tasks: the newest."""

_SUFFIX: Final[Mapping[str, str]] = {"mp4": ".mp4", "png": ".png", "jpeg": ".jpg", "webp": ".webp"}

Task: TypeAlias = JobRecord | Ticket
"""A job, or posts that are no job (yet)."""


class TaskBook:
    """All tasks of the server. Every job is a task, however it came; its id is the job's unless the client gave one.

    What became a job is known by the job alone, and so outlives the server with it; posts that wait for others do not.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._service = context.service
        self._tickets = Tickets()
        ports = context.config.task_ports or ()
        self._parts: dict[int, Part] = dict(zip(ports, PARTS, strict=False))

    # -- creating ------------------------------------------------------------------------------------------------

    async def create(self, request: Request, output: Output) -> TaskCreated:
        """The task that a post starts, or is a part of."""
        fields, order = await self._read(request, output)
        part = self._parts.get(request.scope["server"][1])
        if part is None:
            record = await self._start(request, fields, order, output)
            return TaskCreated(task_id=task_id_of(record), task_status="pending", save_result_path=_path_of(record))
        self._check_free(fields.task_id)
        ticket = self._tickets.post(
            part,
            (request.client.host if request.client else "", fields.digest, fields.task_id or ""),
            task_id=fields.task_id,
            output=output,
            save_path=fields.save_path,
            now=time.monotonic(),
            clock=time.time(),
        )
        path = ticket.save_path
        if ticket.open and ticket.parts >= set(PARTS):
            try:
                path = _path_of(await self._submit(request, ticket, order))
            except BadRequest as error:
                self._tickets.fail(ticket, Reason(error.error_code, error.message), time.time())
                raise
            except TriptychError as error:  # who comes again with this post finds the others here
                self._tickets.put_off(ticket, part, time.monotonic(), retry_seconds(error))
                raise
        return TaskCreated(task_id=ticket.id, task_status="pending", save_result_path=path)

    async def start(self, request: Request, output: Output) -> JobRecord:
        """The job of a post that is a whole task, whichever port it came to, and is answered with the one file."""
        fields, order = await self._read(request, output)
        if order.count > 1:
            raise BadRequest("n", f"n={order.count}: the answer is one image; start a task and fetch its files")
        return await self._start(request, fields, order, output)

    async def _start(self, request: Request, fields: TaskFields, order: Order, output: Output) -> JobRecord:
        if fields.task_id is None:
            metadata = {SAVE_PATH: fields.save_path}
            return await self._context.desk.submit(request, order, output, metadata=metadata)
        self._check_free(fields.task_id)
        ticket = self._tickets.name(
            fields.task_id, output=output, save_path=fields.save_path, now=time.monotonic(), clock=time.time()
        )
        try:
            return await self._submit(request, ticket, order)
        except TriptychError:
            self._tickets.forget(ticket)  # it never was a task, and its name is free again
            raise

    async def _submit(self, request: Request, ticket: Ticket, order: Order) -> JobRecord:
        metadata = {TASK_ID: ticket.id, SAVE_PATH: ticket.save_path}
        record = await self._context.desk.submit(request, order, ticket.output, metadata=metadata)
        self._tickets.started(ticket, record.id)
        if task_id_of(record) == ticket.id:
            self._tickets.forget(ticket)  # kept only where it stands for the job of another task
        return record

    def _check_free(self, id: str | None) -> None:
        if id is not None and self._service.named(id) is not None:
            raise taken(id)

    async def _read(self, request: Request, output: Output) -> tuple[TaskFields, Order]:
        body = await read_body(request)
        schema = need_schema(self._service)
        fields = await to_thread.run_sync(read_fields, schema, body, output)
        try:
            order = await self._context.desk.read(request, fields.body, output, paths=True, adaptive=fields.adaptive)
        except BadRequest as error:
            raise in_client_words(error, fields.names) from error
        if order.count > 1 and schema.param("n") is None:
            raise BadRequest("n", f"n={order.count}: model {schema.model!r} makes 1 image a task; start more tasks")
        if fields.save_path:
            if not PurePosixPath(fields.save_path).suffix:
                suffix = _SUFFIX[order.params["output_format"]]
                fields = replace(fields, save_path=fields.save_path + suffix)
            await to_thread.run_sync(self._service.saved.check, fields.save_path)
        return fields, order

    # -- looking -------------------------------------------------------------------------------------------------

    def find(self, id: str) -> Task:
        """The task of that id; raises `NotFound`."""
        self._tickets.expire(time.monotonic(), time.time())
        if (ticket := self._tickets.get(id)) is not None:
            return ticket if ticket.job is None else self._service.get(ticket.job)
        try:
            return self._service.get(RequestId(id))
        except NotFound:
            if (record := self._service.named(id)) is None:
                raise
            return record

    async def status(self, task: Task) -> TaskStatus:
        """The task as it is now. It is completed only once its file lies where it was wanted."""
        if isinstance(task, Ticket):
            reason = task.reason
            return TaskStatus(
                task_id=task.id,
                status="pending" if reason is None else "cancelled" if reason.code == "cancelled" else "failed",
                start_time=_iso(task.created),
                end_time=None if task.ended is None else _iso(task.ended),
                error=None if reason is None else reason.message,
                error_type=None if reason is None else reason.code,
                save_result_path=task.save_path,
            )
        problem = await self._service.saved.ensure(task.id)
        error = error_of(task.view)
        return TaskStatus(
            task_id=task_id_of(task),
            status="failed" if problem else state_of(task),
            start_time=_iso(task.started_at or task.created_at),
            end_time=None if task.completed_at is None else _iso(task.completed_at),
            error=problem or (None if error is None else error.message),
            error_type="storage_failed" if problem else None if error is None else error.code,
            save_result_path=_path_of(task),
        )

    async def all(self) -> dict[str, TaskStatus]:
        """The newest tasks, oldest first."""
        self._tickets.expire(time.monotonic(), time.time())
        tasks: list[tuple[float, Task]] = [(t.created, t) for t in self._tickets if t.job is None]
        for output in ("video", "image"):
            records, _ = self._service.page(output=output, after=None, limit=LISTED, order="desc")
            tasks += [(record.created_at, record) for record in records]
        tasks.sort(key=lambda pair: pair[0])
        statuses = [await self.status(task) for _, task in tasks]
        return {status.task_id: status for status in statuses}

    async def stop(self, task: Task) -> bool:
        """Cancel a task; whether there was anything to cancel."""
        if isinstance(task, Ticket):
            if task.open:
                self._tickets.fail(task, Reason("cancelled", "the task was cancelled"), time.time())
                return True
            return False
        if task.ended:
            return False
        await self._service.cancel(task.id)
        return True


def state_of(record: JobRecord) -> TaskState:
    """The Task API's word for the state of a job."""
    match record.view.state:
        case JobState.DONE:
            return "completed"
        case JobState.FAILED | JobState.TIMED_OUT:
            return "failed"
        case JobState.CANCELLED:
            return "cancelled"
        case _:
            return "pending" if record.started_at is None else "processing"


def task_id_of(record: JobRecord) -> str:
    """The id under which a job is a task."""
    return record.metadata.get(TASK_ID) or record.id


def paths_of(record: JobRecord) -> list[str]:
    """Where its files are, under the output folder; none while there are none."""
    path = record.metadata.get(SAVE_PATH)
    return [place_of(path, index) if path else file.name for index, file in enumerate(record.files)]


def _path_of(record: JobRecord) -> str:
    """Where its file, or the first of them, is or will be, under the output folder."""
    if record.files:
        return paths_of(record)[0]
    number = "-0" if record.params.get("n", 1) > 1 else ""
    return record.metadata.get(SAVE_PATH) or f"{record.id}{number}{_SUFFIX[record.params['output_format']]}"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
