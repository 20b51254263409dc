"""Planes that are shared by the tests of a file, and empty again after each."""

from __future__ import annotations

import time
from collections.abc import Iterator

from triptych.transport.data.pooled import PooledPlane


def empty_again(opened: PooledPlane) -> Iterator[PooledPlane]:
    """The body of a fixture that lends the one plane of this process to a test."""
    yield opened
    opened.check_integrity()
    opened.release([manifest.copy for manifest in opened.copies()])
    opened.take_dropped()
    until_drained(opened)


def until_drained(plane: PooledPlane, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while plane.used_bytes + plane.gpu_used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (plane.used_bytes, plane.gpu_used_bytes) == (0, 0)
