"""What the router counts, told in the log: each one while they are few, their number when they come as a flood."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from triptych.core.events import Count

log = logging.getLogger(__name__)

PERIOD = 10.0
"""Seconds over which notices of one name are counted."""
IN_FULL = 20
"""Notices of one name that are told in full in each period."""
_LONGEST = 500
"""Characters of a notice: ids and details come from peers."""


class Notices:
    """A log that a stranger's messages can neither fill nor forge lines of. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seen: Counter[str] = Counter()

    def add(self, count: Count) -> None:
        """Tell of one thing, unless there were too many of its kind lately."""
        self.flush()
        self._seen[count.name] += 1
        if self._seen[count.name] <= IN_FULL:
            text = f"{count.name}: {count.detail} (instance {count.instance}, request {count.request})"
            log.info("%s", _plain(text))

    def flush(self) -> None:
        """At the end of a period, say how many were left out."""
        now = self._clock()
        if now - self._since < PERIOD:
            return
        for name, seen in self._seen.items():
            if seen > IN_FULL:
                log.info("%s: %d more in the last %.0f s", name, seen - IN_FULL, now - self._since)
        self._seen.clear()
        self._since = now


def _plain(text: str) -> str:
    """``text`` in one line of printable characters and not too long."""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
