"""The leave-taking of an instance that was asked to stop: how long it stays, and when it hands over what runs."""

from __future__ import annotations

_HAND_OVER = 5.0
"""Seconds before its end at which an instance stops what still runs, so that another can take it over; half of the
time that it has, when that is less."""

_SILENCE = 2.0
"""Seconds without an answer after which there is no server to wait for."""


class Drain:
    """Times are in seconds of the machine's clock."""

    def __init__(self, now: float, seconds: float, reason: str, *, failed: bool = False) -> None:
        self.reason = reason
        self.failed = failed
        """Whether it leaves because something in it broke."""
        self.until = now + seconds
        """When the instance leaves whatever runs."""
        self._hand_over = self.until - min(_HAND_OVER, seconds / 2)
        self._heard = now
        self._needed = True
        self._handed_over = False

    def answer(self, now: float, *, needed: bool) -> None:
        """The server has said whether it needs this instance."""
        self._heard = now
        self._needed = needed

    def seconds_left(self, now: float) -> float:
        """Until the instance leaves whatever runs."""
        return max(0.0, self.until - now)

    def over(self, now: float, *, working: bool) -> bool:
        """Whether to leave now."""
        return now >= self.until or now >= self._heard + _SILENCE or not (working or self._needed)

    def hand_over(self, now: float) -> bool:
        """Whether to stop now what still runs; true once."""
        if self._handed_over or now < self._hand_over:
            return False
        self._handed_over = True
        return True

    @property
    def deadline(self) -> float:
        """When `over` or `hand_over` may next change by time alone."""
        return min(self.until, self._heard + _SILENCE, self.until if self._handed_over else self._hand_over)
