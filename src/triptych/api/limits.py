"""What is taken in: how many requests at once, how long they would wait, and how many of one API key."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from triptych.api.errors import TooBusy
from triptych.api.keys import CALLER
from triptych.api.rates import Rates
from triptych.api.timeouts import Timeouts
from triptych.config import ServerConfig
from triptych.core.states import COUNTS_AS_WAITING, TERMINAL
from triptych.errors import NotFound
from triptych.ids import RequestId
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService


class Limits:
    """Counts live requests, with those that are being accepted at the moment.

    Paused ones hold no place of these, for nothing says when they go on: they have as many places of their own.
    """

    def __init__(self, service: DiffusionService, config: ServerConfig) -> None:
        self._service = service
        self._most = config.max_live_requests
        self._most_of_key = config.max_concurrency_per_key
        self._most_waiting = config.max_queue
        self._longest_wait = config.max_wait
        self._rates = None if config.max_rate_per_key is None else Rates(config.max_rate_per_key)
        self._entering: Counter[str | None] = Counter()
        self._jobs: dict[str, set[RequestId]] = {}
        """Jobs of each key that have been live lately."""

    @contextmanager
    def entering(self, caller: str | None, timeouts: Timeouts) -> Generator[Callable[[RequestId], None]]:
        """Hold room for one request while its job is made; call what is given with the job's id. Raises `TooBusy`."""
        with self.looking(caller, timeouts):
            if self._rates is not None and caller is not None:
                self._rates.take(caller, time.monotonic())
            yield lambda job: self._entered(caller, job)

    @contextmanager
    def looking(self, caller: str | None, timeouts: Timeouts) -> Generator[None]:
        """Hold room for one request while it is still looked at. Raises `TooBusy`."""
        self.check(caller, timeouts)
        self._entering[caller] += 1
        try:
            yield
        finally:
            self._entering[caller] -= 1

    def check(self, caller: str | None, timeouts: Timeouts, count: int = 1) -> None:
        """Raise `TooBusy` unless ``count`` requests may enter now. Nothing is held for them."""
        self._check_all(timeouts, count)
        self._check_key(caller, count)
        if self._rates is not None and caller is not None:
            self._rates.check(caller, time.monotonic(), count)

    def check_pause(self, job: JobRecord) -> None:
        """Raise `TooBusy` when no more may be paused: they take memory and have no clock."""
        if job.ended or job.view.paused:
            return
        paused = self._service.paused()
        if len(paused) >= self._most:
            raise TooBusy(f"{len(paused)} requests are paused already, as many as may be (--max-live-requests)")
        caller = job.metadata.get(CALLER)
        if caller is None or self._most_of_key is None:
            return
        count = len(self._live_of(caller) & paused.keys())
        if count >= self._most_of_key:
            raise TooBusy(
                f"{count} requests of this API key are paused already, as many as may be (--max-concurrency-per-key)"
            )

    def check_resume(self, job: JobRecord) -> None:
        """Raise `TooBusy` while there is no place for a paused request to go on."""
        if not job.ended and job.view.paused:
            self._check_live(1)
            self._check_key(job.metadata.get(CALLER), 1)

    def most(self, caller: str | None) -> tuple[int, str]:
        """Requests that may ever enter at one moment, and which setting says so."""
        found = [(self._most, "--max-live-requests")]
        if caller is not None and self._most_of_key is not None:
            found.append((self._most_of_key, "--max-concurrency-per-key"))
        if caller is not None and self._rates is not None:
            found.append((self._rates.most, "--max-rate-per-key"))
        return min(found)

    def _check_all(self, timeouts: Timeouts, count: int) -> None:
        """Raises `TooBusy` when there is too much of everybody's."""
        live = self._check_live(count)
        wait = self._service.predicted_wait()
        states = Counter(self._service.states())
        states.subtract(self._service.paused().values())
        waiting = sum(states[state] for state in COUNTS_AS_WAITING) + self._entering.total()
        if self._most_waiting is not None and waiting >= self._most_waiting:
            turn = None if wait is None else wait / max(1, live)
            raise TooBusy(f"{waiting} requests wait already, as many as may (--max-queue)", retry_after=turn)
        longest = timeouts.queue if self._longest_wait is None else min(self._longest_wait, timeouts.queue)
        if wait is not None and wait > longest:
            raise TooBusy(
                f"a request that comes now would wait for about {wait:.0f} s, and {longest:g} s are the most",
                retry_after=wait - longest,
            )

    def _check_live(self, count: int) -> int:
        """How many wait or run; raises `TooBusy` when there is no place for ``count`` more."""
        states = self._service.states()
        live = sum(jobs for state, jobs in states.items() if state not in TERMINAL)
        live += self._entering.total() - len(self._service.paused())
        if live + count > self._most:
            raise TooBusy(f"{live} requests wait or run already, and {self._most} are as many as this server takes")
        return live

    def _entered(self, caller: str | None, job: RequestId) -> None:
        if caller in self._jobs:
            self._jobs[caller].add(job)

    def _check_key(self, caller: str | None, count: int) -> None:
        """Raises `TooBusy` when there may be no more of this key."""
        if caller is None or self._most_of_key is None:
            return
        live = len(self._live_of(caller) - self._service.paused().keys()) + self._entering[caller]
        if live + count > self._most_of_key:
            raise TooBusy(f"{live} requests of this API key wait or run already, and it may have {self._most_of_key}")

    def _live_of(self, caller: str) -> set[RequestId]:
        """The live jobs of a key, paused ones too."""
        jobs = self._jobs.get(caller)
        if jobs is None:  # the first of this life; jobs of an earlier one may still be live
            jobs = {record.id for record in self._service.live() if record.metadata.get(CALLER) == caller}
        self._jobs[caller] = jobs = {job for job in jobs if self._is_live(job)}
        return jobs

    def _is_live(self, job: RequestId) -> bool:
        try:
            return not self._service.get(job).ended
        except NotFound:
            return False
