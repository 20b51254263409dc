"""How many requests an API key may start in a minute."""

from __future__ import annotations

from triptych.api.errors import TooBusy

MINUTE = 60.0


class Rates:
    """A bucket of ``per_minute`` tokens for each key, filled evenly. Times are in seconds of any steady clock."""

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tokens that were left, and when."""

    def take(self, caller: str, now: float) -> None:
        """Count one request of a key. Raises `TooBusy` with the time until the next one is allowed."""
        tokens, since = self._buckets.get(caller, (float(self._most), now))
        tokens = min(self._most, tokens + (now - since) * self._most / MINUTE)
        if tokens < 1.0:
            raise TooBusy(
                f"this API key has started {self._most} requests within a minute, as many as it may",
                retry_after=(1.0 - tokens) * MINUTE / self._most,
            )
        self._buckets[caller] = (tokens - 1.0, now)
