"""What happens to jobs and what the router counts, told in the log: each one while they are few, their number when
they come as a flood."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

from triptych.core.events import Count, CountName, JobView
from triptych.ids import RequestId

log = logging.getLogger(__name__)

PERIOD = 10.0
"""Seconds over which notices of one name are counted."""
IN_FULL = 20
"""Notices of one name that are told in full in each period."""
_GRAVE: frozenset[CountName] = frozenset({"books_wrong", "instance_quarantined", "instance_refused", "store_failed"})
"""What an operator has to do something about."""
_LONGEST = 500
"""Characters of a notice: ids and details come from peers."""


CAUSE: ContextVar[str] = ContextVar("cause", default="")
"""The id of the HTTP request that is being answered, which its client got as ``x-request-id``."""


class Notices:
    """A log that a stranger's messages can neither fill nor forge lines of. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seen: Counter[str] = Counter()

    def add(self, count: Count) -> None:
        """Tell of what the router counted."""
        if self._few(count.name):
            text = f"{count.name}: {count.detail} (instance {count.instance}, request {count.request})"
            log.log(logging.WARNING if count.name in _GRAVE else logging.INFO, "%s", _plain(text))

    def accepted(self, request: RequestId) -> None:
        """Tell that a request was accepted, and by which call."""
        if self._few("accepted"):
            cause = CAUSE.get()
            log.info("%s", _plain(f"accepted: request {request}" + (f" by HTTP request {cause}" if cause else "")))

    def ended(self, view: JobView) -> None:
        """Tell what became of a request."""
        if self._few(view.state):
            text = (
                f"{view.state}: request {view.request} after {view.waiting_seconds:.1f} s of waiting and "
                f"{view.running_seconds:.1f} s of running, attempt {view.attempt}"
            )
            if view.error is not None:
                text += f", code {view.error.code}: {view.error.message}"
            log.info("%s", _plain(text))

    def _few(self, kind: str) -> bool:
        """Whether one more of a kind is told in full: there were not too many of them lately."""
        self.flush()
        self._seen[kind] += 1
        return self._seen[kind] <= IN_FULL

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
