"""What the accelerated models of one process have done so far, for the log and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts since the process began. Written by the compute thread alone; others may read a count at any time."""

    compiling: Callable[[], None] | None = None
    """Called when a compilation begins, from whatever thread that is in."""
    compilations: int = 0
    """Graphs compiled, warm-up included."""
    compile_seconds: float = 0.0
    uncompiled: int = 0
    """Calls of compiled parts computed without a graph, for there were too many."""
    prompt_hits: int = 0
    """Text encoder calls answered from the cache."""
    prompt_misses: int = 0
    steps_skipped: int = 0
    """Denoiser forwards that step caching made short."""
    unshared_forwards: int = 0
    """Denoiser forwards that each of several GPUs computed whole, for their tokens do not divide."""
    turnovers: int = 0
    """Stages that began when the one before was over, and were known of by then."""
    turnover_seconds: float = 0.0
    """Time that passed in between, until the model itself computed."""
