"""Requests waiting for one role, in the order in which they were accepted, whatever brought them here."""

from __future__ import annotations

from bisect import bisect_left, insort

from triptych.core.job import Job

_COMPACT = 256


class StageQueue:
    """First accepted, first served: a request that comes back after a fault goes before those accepted later.

    Adding the latest request and taking the first one are cheap; the place of any request is found by bisection.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, Job] = {}
        """The requests in line, in no particular order."""
        self._order: list[int] = []
        self._head = 0
        """Numbers before this index were taken; cutting the list at every take would move all the others."""

    def __len__(self) -> int:
        return len(self.by_number)

    def __contains__(self, job: Job) -> bool:
        return job.number in self.by_number

    def add(self, job: Job) -> None:
        """Line ``job`` up by its number."""
        self.by_number[job.number] = job
        job.queued = True
        if self._head == len(self._order) or self._order[-1] < job.number:
            self._order.append(job.number)
        else:
            insort(self._order, job.number, lo=self._head)

    def take(self) -> Job:
        """Remove and return the first request. Raises IndexError when there is none."""
        number = self._order[self._head]
        self._head += 1
        if self._head >= _COMPACT and 2 * self._head >= len(self._order):
            del self._order[: self._head]
            self._head = 0
        job = self.by_number.pop(number)
        job.queued = False
        return job

    def remove(self, job: Job) -> None:
        """Take ``job`` out from wherever it stands."""
        del self.by_number[job.number]
        job.queued = False
        del self._order[bisect_left(self._order, job.number, lo=self._head)]

    def position(self, job: Job) -> int:
        """How many requests stand before ``job``."""
        return bisect_left(self._order, job.number, lo=self._head) - self._head

    def jobs(self) -> tuple[Job, ...]:
        """All requests in line, first one first."""
        return tuple(self.by_number[number] for number in self._order[self._head :])
