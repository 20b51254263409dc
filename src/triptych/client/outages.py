"""Answers that say nothing of a job: what stands between client and server, or the server's restart, is the matter.

Jobs outlive these, so a wait goes on through them. An answer of the server itself, such as that a job is gone, is none.
"""

from __future__ import annotations

from typing import TypeAlias

from triptych.client.answers import AnswerBroken, ClientTimeout, RequestRefused, ServerUnreachable

PATIENCE_SECONDS = 120.0
"""How long a wait goes on without one answer about the job: jobs may outlive the server's restart."""
LONGEST_REST = 30.0
"""Seconds for which a Retry-After is followed."""
PASSING = frozenset({429, 502, 503, 504})
"""HTTP statuses that time mends: too many requests, and a proxy that does not get through to the server."""

Failure: TypeAlias = ServerUnreachable | ClientTimeout | RequestRefused


class Outage:
    """Since when no answer has come. ``about``: what is asked for, for the message of one that lasts too long."""

    def __init__(self, about: str) -> None:
        self._about = about
        self._since: float | None = None

    def over(self) -> None:
        """An answer came."""
        self._since = None

    def bear(self, error: Failure, begun: float, now: float) -> float:
        """Seconds to leave the server alone after a call that began at ``begun`` failed, as it asks for; 0: no wish.

        Raises the error itself where it is an answer, and `ServerUnreachable` when none came for `PATIENCE_SECONDS`.
        Times are on any steady clock.
        """
        if isinstance(error, RequestRefused) and error.http_status not in PASSING:
            raise error
        if isinstance(error, AnswerBroken):  # until then there was one, however long it took
            self._since = now
        elif self._since is None:
            self._since = begun
        if now - self._since >= PATIENCE_SECONDS:
            text = f"no answer about {self._about} for {now - self._since:.0f} seconds, it may go on: {error.message}"
            raise ServerUnreachable(text) from error
        asked = error.retry_after if isinstance(error, RequestRefused) else None
        return min(LONGEST_REST, asked or 0.0)
