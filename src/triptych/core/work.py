"""One lease as its instance knows it, from `RunStage` until the server has acknowledged the outcome."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from triptych.wire.messages import Lease, Outcome, Pull

RESEND_INTERVAL = 2.0
"""Seconds after which an outcome that was not acknowledged is sent again, for the first time; then twice as many."""

LONGEST_RESEND_INTERVAL = 8.0
"""Seconds between two of them at most: what a server cannot store at present is tried again so often."""

PROGRESS_INTERVAL = 0.2
"""Seconds between progress reports of one lease."""


class Phase(enum.Enum):
    """Where a lease is inside the instance."""

    PULLING = enum.auto()
    COMPUTING = enum.auto()
    """With the compute thread, perhaps queued behind others."""
    SUSPENDING = enum.auto()
    """To be stopped between two steps, unless it is finished before."""
    ABORTING = enum.auto()
    ENDED = enum.auto()


@dataclass(kw_only=True, slots=True, eq=False)
class Work:
    """The machine's books of one lease."""

    NEVER: ClassVar[float] = float("inf")

    lease: Lease
    params: dict[str, Any]
    blobs: tuple[bytes, ...]
    budget_seconds: float
    phase: Phase = Phase.PULLING
    started: bool = False
    progress: tuple[int, int] | None = None
    """Step and steps that were not reported yet."""
    preview: bytes = b""
    """Picture that was not reported yet; a newer one takes its place."""
    progress_at: float = -NEVER
    pull: Pull | None = None
    """How its inputs were fetched."""
    outcome: Outcome | None = None
    due: float = NEVER
    """When held back progress or an outcome without acknowledgement has to be sent."""
    patience: float = RESEND_INTERVAL
    """Seconds until the outcome is sent again."""
