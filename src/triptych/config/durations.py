"""The buckets of every histogram of seconds, so that those of a server and of its instances compare."""

from __future__ import annotations

from typing import Final

BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
"""Upper bounds in seconds, from a handoff to the longest request that may be allowed; one more has no bound."""
