"""How long a device stands still between a stage and one that could have followed at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from triptych.accel.tally import Tally
from triptych.worker.jobs import Ticket


class Turnover:
    """Counts into a tally. Used from the compute thread only."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._ended_at: float | None = None
        """When the last stage was over, while nothing has begun since; seconds of `time.monotonic`."""

    def ended(self) -> None:
        """A stage is over, and the device has done all of it."""
        self._ended_at = time.monotonic()

    def begins(self, ticket: Ticket, *, alone: bool) -> Callable[[], None]:
        """A stage is the next one, and nothing else computes if it is ``alone``. Gives what is to be called when the
        model itself is: what is done before is not what the device is there for."""
        ended_at, self._ended_at = self._ended_at, None
        counts = ended_at is not None and alone and ticket.since < ended_at

        def computes() -> None:
            nonlocal counts
            if counts and ended_at is not None:
                counts = False
                self._tally.turnovers += 1
                self._tally.turnover_seconds += time.monotonic() - ended_at

        return computes
