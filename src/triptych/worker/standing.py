"""Whether the server has this instance: for the log, the metrics, and whoever probes the process."""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger(__name__)

PATIENCE: Final = 10.0
"""Seconds without an answer to the first hello after which the log says so."""
_AGAIN: Final = 60.0
"""Seconds until it says so again."""


class Standing:
    """Watches the answers of the server at ``server_addr``. For the control thread, but for reading `welcomed`."""

    def __init__(self, server_addr: str) -> None:
        self._server_addr = server_addr
        self.welcomed = False
        self._since: float | None = None
        self._due = 0.0
        self._refusal = ""

    def saw(self, welcomed: bool, now: float, refusal: str = "") -> None:
        """Whether the latest hello has been answered, at ``now`` in seconds of any clock. ``refusal``: why the server
        takes this instance not yet, where it has said that."""
        if welcomed != self.welcomed or self._since is None:
            self._since, self._due = now, now + PATIENCE
            if welcomed:
                log.info("the server at %s has taken this instance", self._server_addr)
            elif self.welcomed:
                log.warning("the server at %s does not know this instance any more: saying hello", self._server_addr)
        if refusal:
            if refusal != self._refusal or now >= self._due:
                self._due = now + _AGAIN
                log.error(
                    "the server at %s refuses this instance for now, and is asked again: %s", self._server_addr, refusal
                )
        elif not welcomed and now >= self._due:
            self._due = now + _AGAIN
            log.warning(
                "the server at %s has not answered for %.0f s: is it there, is this its address, and are its "
                "keys (--disagg-key-dir) those of this instance?",
                self._server_addr,
                now - self._since,
            )
        self.welcomed, self._refusal = welcomed, refusal
