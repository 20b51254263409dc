"""How many requests may be live at once: in all, and of one API key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from triptych.api.errors import TooBusy
from triptych.api.keys import CALLER
from triptych.config import ServerConfig
from triptych.core.states import TERMINAL
from triptych.errors import NotFound
from triptych.ids import RequestId
from triptych.server.service import DiffusionService


class Limits:
    """Counts live requests, with those that are being accepted at the moment."""

    def __init__(self, service: DiffusionService, config: ServerConfig) -> None:
        self._service = service
        self._most = config.max_live_requests
        self._most_of_key = config.max_concurrency_per_key
        self._entering: Counter[str | None] = Counter()
        self._jobs: dict[str, set[RequestId]] = {}
        """Jobs of each key that have been live lately."""

    @contextmanager
    def entering(self, caller: str | None) -> Generator[Callable[[RequestId], None]]:
        """Hold room for one request while its job is made; call what is given with the job's id. Raises `TooBusy`."""
        states = self._service.states()
        live = sum(count for state, count in states.items() if state not in TERMINAL) + self._entering.total()
        if live >= self._most:
            raise TooBusy(f"{live} requests wait or run already, as many as this server takes; try again later")
        self._check_key(caller)
        self._entering[caller] += 1
        try:
            yield lambda job: self._entered(caller, job)
        finally:
            self._entering[caller] -= 1

    def _entered(self, caller: str | None, job: RequestId) -> None:
        if caller in self._jobs:
            self._jobs[caller].add(job)

    def _check_key(self, caller: str | None) -> None:
        """Raises `TooBusy` when there may be no more of this key."""
        if caller is None or self._most_of_key is None:
            return
        jobs = self._jobs.get(caller)
        if jobs is None:  # the first of this life; jobs of an earlier one may still be live
            jobs = {record.id for record in self._service.live() if record.metadata.get(CALLER) == caller}
        self._jobs[caller] = jobs = {job for job in jobs if self._is_live(job)}
        count = len(jobs) + self._entering[caller]
        if count >= self._most_of_key:
            raise TooBusy(f"{count} requests of this API key wait or run already, as many as it may; try again later")

    def _is_live(self, job: RequestId) -> bool:
        try:
            return not self._service.get(job).ended
        except NotFound:
            return False
