"""A stage that the compute thread is at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych.pipeline.frames import FrameStream
from triptych.pipeline.stage import StageRun
from triptych.worker.jobs import Ticket


@dataclass(kw_only=True, slots=True, eq=False)
class Running:
    """A stage in the making."""

    number: int
    """Those that began before it have lower ones."""
    ticket: Ticket
    run: StageRun
    params: Mapping[str, Any]
    """Of the request."""
    wanted: str | None
    """Output format that it asked for."""
    seconds: float
    """Time spent on it so far, without the turns of others."""
    step: int
    saved_at: float
    """When its last checkpoint was taken, or it began; seconds of `time.monotonic`."""
    due: int = 0
    """When it is to end, if it comes to that (`triptych.worker.precedence`); at once, as long as it has no step done,
    for only that shows how many there are."""
    computes: Callable[[], None]
    """To be called when the model itself begins to compute."""
    streams: tuple[FrameStream, ...] = ()
    """Where its frames go, once the first is there."""
    saving: threading.Event | None = None
    """Set once its last checkpoint is staged."""
