"""How many requests an API key may start in a minute."""

from __future__ import annotations

from triptych.api.errors import TooBusy

MINUTE = 60.0


class Rates:
    """A bucket of ``per_minute`` tokens for each key, filled evenly. Times are in seconds of any steady clock."""

    def __init__(self, per_minute: int) -> None:
        self.most = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tokens that were left, and when."""

    def check(self, caller: str, now: float, count: int = 1) -> None:
        """Raise `TooBusy`, with the time until then, unless ``count`` requests of a key may start."""
        tokens = self._tokens(caller, now)
        if tokens < count:
            raise TooBusy(
                f"this API key has started as many requests as it may within a minute, {self.most}",
                retry_after=(count - tokens) * MINUTE / self.most,
            )

    def take(self, caller: str, now: float) -> None:
        """Count one request of a key. Raises `TooBusy` as `check` does."""
        self.check(caller, now)
        self._buckets[caller] = (self._tokens(caller, now) - 1.0, now)

    def _tokens(self, caller: str, now: float) -> float:
        tokens, since = self._buckets.get(caller, (float(self.most), now))
        return min(self.most, tokens + (now - since) * self.most / MINUTE)
