"""Requests that wait for their jobs: the last client of a job that hangs up stops it, and the wait has a deadline.

So does the server's stop: who still waits then is told to come again in time for that to be done about the job.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Final

from starlette.requests import Request

from triptych.api.errors import DeadlinePassed, JobCancelled, JobFailed
from triptych.api.views import error_of
from triptych.core.events import JobState
from triptych.errors import NotFound, NotReady
from triptych.ids import RequestId
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService

STOP_SECONDS: Final = 3.0
"""How long a wait goes on once the server is stopping, of the five that its connections have."""
_LOOK_SECONDS: Final = 0.5


class Place:
    """One HTTP request's place among those that wait for a job: with an Idempotency-Key there may be several."""

    def __init__(self, job: JobRecord, waiters: Counter[RequestId], kept: set[RequestId]) -> None:
        self.job = job
        self._waiters = waiters
        self._kept = kept
        self._left = False
        waiters[job.id] += 1

    def keep(self) -> None:
        """The client was told where to find what the job made, so it must stay."""
        self._kept.add(self.job.id)

    def leave(self) -> bool:
        """Wait no longer; whether nobody has a use for the job any more. Once left, the answer is no."""
        if self._left:
            return False
        self._left = True
        self._waiters[self.job.id] -= 1
        if self._waiters[self.job.id]:
            return False
        del self._waiters[self.job.id]
        useless = self.job.id not in self._kept
        self._kept.discard(self.job.id)
        return useless


class Waiting:
    """Waits for jobs on behalf of HTTP requests, until the server is ``stopping``. Belongs to the loop's thread."""

    def __init__(self, service: DiffusionService, stopping: Callable[[], bool]) -> None:
        self._service = service
        self._stopping = stopping
        self._waiters: Counter[RequestId] = Counter()
        self._kept: set[RequestId] = set()
        """Jobs that somebody waits for and whose files somebody else was told of."""

    def join(self, job: JobRecord) -> Place:
        """Begin to wait for a job, in the same turn of the loop in which it was found."""
        return Place(job, self._waiters, self._kept)

    async def outcome(self, request: Request, jobs: Sequence[JobRecord], seconds: float) -> list[JobRecord] | None:
        """The ended jobs, all of them done; None when the client hung up first.

        Raises `JobFailed` and its kin, `DeadlinePassed` after ``seconds``, and `NotReady` when the server stops.
        """
        ends = [asyncio.ensure_future(self._end(job)) for job in jobs]
        done = asyncio.gather(*ends)
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            if await self._comes(done, gone, seconds):
                return list(done.result())
            if not gone.done():
                raise DeadlinePassed(f"the images were not made within {seconds:g} seconds")
            return None
        finally:
            for task in (done, gone, *ends):
                task.cancel()
            await asyncio.gather(done, gone, *ends, return_exceptions=True)

    async def _comes(self, done: asyncio.Future[Any], gone: asyncio.Future[None], seconds: float) -> bool:
        """Wait for ``done`` until ``gone``, or for ``seconds``; whether it came. Raises `NotReady`."""
        clock = asyncio.get_running_loop().time
        end, stop = clock() + seconds, inf
        while not done.done() and not gone.done() and (now := clock()) < end:
            if now >= stop:
                raise NotReady("the server is stopping: send the request again")
            if self._stopping():
                stop = min(stop, now + STOP_SECONDS)
            wait = min(_LOOK_SECONDS, end - now, max(0.0, stop - now))
            await asyncio.wait((done, gone), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        return done.done()

    async def forget(self, *jobs: RequestId) -> None:
        """Stop and delete jobs that nobody has a use for; nothing happens to those that are gone already."""
        # Before the first deletion is waited for: who asks for the same meanwhile must not join the last of them.
        for job in jobs:
            with suppress(NotFound):
                self._service.free_key(job)
        for job in jobs:
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
                raise JobFailed(error.code, error.message, blame=record.view.error.blame if record.view.error else "us")


async def _hung_up(request: Request) -> None:
    """Returns when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
