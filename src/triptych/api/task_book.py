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
from triptych.api.orders import Order, Output
from triptych.api.ready import need_schema
from triptych.api.saved import KEY, Saved
from triptych.api.task_orders import TaskFields, in_client_words, read_fields
from triptych.api.task_shapes import TaskCreated, TaskState, TaskStatus
from triptych.api.tickets import PARTS, Part, Reason, Ticket, Tickets
from triptych.api.views import error_of
from triptych.core.events import JobState
from triptych.errors import BadRequest, TriptychError
from triptych.ids import RequestId
from triptych.server.records import JobRecord

LISTED: Final = 1000
"""Most jobs of each kind in a list of tasks: the newest."""

_SUFFIX: Final[Mapping[str, str]] = {"mp4": ".mp4", "png": ".png", "jpeg": ".jpg", "webp": ".webp"}

Task: TypeAlias = JobRecord | Ticket
"""A job, or posts that are no job (yet)."""


class TaskBook:
    """All tasks of the server. Every job is a task, however it came; its id is the job's unless the client gave one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._service = context.service
        self._tickets = Tickets()
        self.saved = Saved(context.service, context.config.output_dir, context.config.state_dir)
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
            path = _path_of(await self._submit(request, ticket, order))
        return TaskCreated(task_id=ticket.id, task_status="pending", save_result_path=path)

    async def start(self, request: Request, output: Output) -> JobRecord:
        """The job of a post that is a whole task, whichever port it came to."""
        fields, order = await self._read(request, output)
        return await self._start(request, fields, order, output)

    async def _start(self, request: Request, fields: TaskFields, order: Order, output: Output) -> JobRecord:
        if fields.task_id is None:
            return await self._hand_in(request, order, output, {KEY: fields.save_path})
        ticket = self._tickets.name(
            fields.task_id, output=output, save_path=fields.save_path, now=time.monotonic(), clock=time.time()
        )
        try:
            return await self._submit(request, ticket, order)
        except TriptychError:
            self._tickets.forget(ticket)  # it never was a task, and its name is free again
            raise

    async def _submit(self, request: Request, ticket: Ticket, order: Order) -> JobRecord:
        try:
            record = await self._hand_in(request, order, ticket.output, {"task_id": ticket.id, KEY: ticket.save_path})
        except TriptychError as error:
            self._tickets.fail(ticket, Reason(error.code, error.message), time.time())
            raise
        ticket.job = record.id
        return record

    async def _hand_in(self, request: Request, order: Order, output: Output, metadata: Mapping[str, str]) -> JobRecord:
        record = await self._context.desk.submit(request, order, output, metadata=metadata)
        self.saved.follow(record)
        return record

    async def _read(self, request: Request, output: Output) -> tuple[TaskFields, Order]:
        body = await read_body(request)
        schema = need_schema(self._service)
        fields = await to_thread.run_sync(read_fields, schema, body, output)
        try:
            order = await self._context.desk.read(fields.body, output, paths=True)
        except BadRequest as error:
            raise in_client_words(error, fields.names) from error
        if fields.save_path:
            if not PurePosixPath(fields.save_path).suffix:
                suffix = _SUFFIX[order.params["output_format"]]
                fields = replace(fields, save_path=fields.save_path + suffix)
            await to_thread.run_sync(self.saved.check, fields.save_path)
        return fields, order

    # -- looking -------------------------------------------------------------------------------------------------

    def find(self, id: str) -> Task:
        """The task of that id; raises `NotFound`."""
        self._tickets.expire(time.monotonic(), time.time())
        ticket = self._tickets.get(id)
        if ticket is None:
            return self._service.get(RequestId(id))
        return ticket if ticket.job is None else self._service.get(ticket.job)

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
        problem = await self.saved.ensure(task)
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
    return record.metadata.get("task_id") or record.id


def _path_of(record: JobRecord) -> str:
    """Where its file is or will be, under the output folder."""
    if record.files and not record.metadata.get(KEY):
        return record.files[0].name
    return record.metadata.get(KEY) or f"{record.id}{_SUFFIX[record.params['output_format']]}"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
