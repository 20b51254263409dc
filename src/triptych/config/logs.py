"""How every process of a deployment logs: to standard error, one line an event, from a level on that can be chosen."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

from triptych.errors import ConfigError

VARIABLE: Final = "TRIPTYCH_LOG_LEVEL"
"""Also what ``--log-level`` sets, so that processes that this one starts inherit it."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")


def configure_logging(who: str) -> None:
    """Mark each line with ``who``; ours are logged from `VARIABLE` on (info unless said), those of libraries from
    warnings on."""
    level = os.environ.get(VARIABLE, "") or "info"
    if level.lower() not in LEVELS:
        raise ConfigError(f"{VARIABLE}={level!r}: must be one of {', '.join(LEVELS)}")
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format=f"%(asctime)s %(levelname)s {who} %(message)s", force=True
    )
    logging.getLogger("triptych").setLevel(level.upper())
