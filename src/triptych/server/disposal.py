"""What is left of jobs that nobody wants any more: deleted at once, or as soon as the store can be reached again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from triptych.errors import StorageFailed
from triptych.ids import RequestId
from triptych.server.records import StoredFile

log = logging.getLogger(__name__)

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds between two rounds of tries; each is twice as long as the one before, beginning anew when one succeeds."""

_IN_A_ROW: Final = 3
"""Tries that fail before a round ends: then it is the store, and not one file."""


@dataclass(frozen=True, slots=True)
class _Waste:
    request: RequestId
    files: tuple[StoredFile, ...]
    rows: bool
    """Whether the journal is to forget the job after that; not before, because a restarted server needs to know."""


class Disposal:
    """Deletes the media of jobs. ``remove`` deletes files, ``forget`` everything else of a job; both may raise
    `StorageFailed` or `OSError`, and may then be called again. ``clock`` gives seconds."""

    def __init__(
        self,
        remove: Callable[[tuple[StoredFile, ...]], Awaitable[None]],
        forget: Callable[[RequestId], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._remove = remove
        self._forget = forget
        self._clock = clock
        self._condemned: set[RequestId] = set()
        self._left: deque[_Waste] = deque()
        self._pause = FIRST_PAUSE
        self._next = 0.0
        self._trying = False

    def condemn(self, request: RequestId) -> None:
        """Whatever is left of a job is to be deleted, by a call of `clear` to come."""
        self._condemned.add(request)

    def condemned(self, request: RequestId) -> bool:
        """Whether something of a job is still to be deleted: it is gone for clients already."""
        return request in self._condemned

    async def clear(self, request: RequestId, files: tuple[StoredFile, ...], *, rows: bool) -> None:
        """Delete files of a job, and with ``rows`` what the journal has of it; what fails is tried again later."""
        self.condemn(request)
        waste = _Waste(request, files, rows)
        if not await self._try(waste):
            if not self._left:
                self._pause = FIRST_PAUSE
                self._next = self._clock() + self._pause
            self._left.append(waste)

    @property
    def due(self) -> bool:
        """Whether it is time to call `retry`."""
        return bool(self._left) and not self._trying and self._clock() >= self._next

    async def retry(self) -> None:
        """Try everything once more that could not be deleted so far, in turn."""
        self._trying = True
        try:
            failed = 0
            for _ in range(len(self._left)):
                waste = self._left.popleft()
                if await self._try(waste):
                    failed, self._pause = 0, FIRST_PAUSE
                else:
                    failed += 1
                    self._left.append(waste)
                if failed == _IN_A_ROW:
                    break
        finally:
            self._trying = False
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._next = self._clock() + self._pause

    async def _try(self, waste: _Waste) -> bool:
        try:
            await self._remove(waste.files)
            if waste.rows:
                await self._forget(waste.request)
        except (StorageFailed, OSError) as error:
            log.error("what is left of %s cannot be deleted yet: %s", waste.request, error)
            return False
        self._condemned.discard(waste.request)
        return True
