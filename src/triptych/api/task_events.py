"""A task as server-sent events, also while its posts still wait for each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from triptych.api.context import Context
from triptych.api.events import KEEP_ALIVE, KEEP_ALIVE_SECONDS, REFRESH_SECONDS, frame
from triptych.api.shapes import JobError, JobEvent
from triptych.api.task_book import TaskBook
from triptych.api.tickets import Ticket
from triptych.errors import NotFound


async def follow_ticket(context: Context, book: TaskBook, ticket: Ticket) -> AsyncGenerator[bytes]:
    """Events from the first post of a task on; those of its job when all posts have come."""
    yield frame("queued", _event(ticket))
    spoken = time.monotonic()
    while ticket.open and not context.events.stopping():
        await asyncio.sleep(REFRESH_SECONDS)
        try:
            book.find(ticket.id)  # gives it up when its time has come
        except NotFound:
            break
        if time.monotonic() - spoken >= KEEP_ALIVE_SECONDS:
            spoken = time.monotonic()
            yield KEEP_ALIVE
    if ticket.reason is not None:
        yield frame("failed", _event(ticket))
    elif ticket.job is not None:
        try:
            record = context.service.get(ticket.job)
        except NotFound:
            return
        async with aclosing(context.events.follow(record, ticket.id)) as frames:
            async for one in frames:
                yield one


def _event(ticket: Ticket) -> JobEvent:
    reason = ticket.reason
    return JobEvent(
        id=ticket.id,
        status="queued" if reason is None else "failed",
        stage="pending" if reason is None else "failed",
        progress=0,
        step=0,
        steps=0,
        attempt=1,
        position=None,
        starts_in_seconds=None,
        eta_seconds=None,
        error=None if reason is None else JobError(code=reason.code, message=reason.message),
    )
