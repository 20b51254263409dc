"""Requests that wait for their jobs: a client that hangs up stops the work, and the wait has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from starlette.requests import Request

from triptych.api.errors import DeadlinePassed, JobCancelled
from triptych.api.views import error_of
from triptych.core.events import JobState
from triptych.errors import BadRequest, NotFound, StageError
from triptych.ids import RequestId
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService


class Waiting:
    """Waits for jobs on behalf of HTTP requests."""

    def __init__(self, service: DiffusionService) -> None:
        self._service = service

    async def outcome(self, request: Request, jobs: Sequence[JobRecord], seconds: float) -> list[JobRecord] | None:
        """The ended jobs, all of them done; None when the client hung up first, and then the jobs are deleted.

        Raises what a job failed with, and `DeadlinePassed` after ``seconds``; the jobs are the caller's then.
        """
        ends = [asyncio.ensure_future(self._end(job)) for job in jobs]
        done = asyncio.gather(*ends)
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait((done, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return list(done.result())
            if not gone.done():
                raise DeadlinePassed(f"the images were not made within {seconds:g} seconds")
            for job in jobs:
                await self.forget(job.id)
            return None
        finally:
            for task in (done, gone, *ends):
                task.cancel()
            await asyncio.gather(done, gone, *ends, return_exceptions=True)

    async def forget(self, job: RequestId) -> None:
        """Stop and delete a job; nothing happens when it is gone already."""
        with suppress(NotFound):
            await self._service.delete(job)

    async def _end(self, job: JobRecord) -> JobRecord:
        record = await self._service.wait(job.id)
        error = error_of(record.view)
        if error is None:
            return record
        match record.view.state:
            case JobState.TIMED_OUT:
                raise DeadlinePassed(error.message)
            case JobState.CANCELLED:
                raise JobCancelled(error.message)
            case _:
                blame = record.view.error.blame if record.view.error else "us"
                if blame == "caller":
                    raise BadRequest(None, error.message, code=error.code)
                raise StageError(error.message)


async def _hung_up(request: Request) -> None:
    """Returns when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
