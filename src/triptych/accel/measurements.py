"""Small measurements made at start-up, kept in a JSON file so that the next start need not make them again.

A file that is missing, damaged or not writable only costs the measurement: it decides nothing but speed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_MOST = 200
"""Entries kept; the oldest go first."""


def read_measurements(file: Path, key: str) -> dict[str, float] | None:
    """What was measured under ``key``: name to seconds. None when nothing was."""
    entry = _entries(file).get(key)
    if not isinstance(entry, dict) or not entry:
        return None
    values: dict[str, float] = {str(name): value for name, value in entry.items() if isinstance(value, float)}
    return values if len(values) == len(entry) else None


def measured(file: Path) -> list[str]:
    """Keys of all that was measured, the oldest first."""
    return list(_entries(file))


def write_measurements(file: Path, key: str, seconds: Mapping[str, float]) -> None:
    """Keep ``seconds`` under ``key``; processes that start at once may overwrite each other's."""
    entries = {**_entries(file), key: dict(seconds)}
    kept = dict(list(entries.items())[-_MOST:])
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text(json.dumps(kept, indent=1))
        part.replace(file)
    except OSError as error:
        log.warning("measurements are not kept: %s", error)


def _entries(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
