"""Greenlets that computations stop in: the same settings hold there as where they were made."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from greenlet import greenlet


def suspendable(compute: Callable[..., Any]) -> greenlet:
    """A greenlet that runs ``compute``, not begun.

    A greenlet has a context of its own, which is empty. Torch keeps its settings in context variables, so that those
    of this thread would not hold in it; hence it gets a copy.
    """
    made = greenlet(compute)
    made.gr_context = contextvars.copy_context()
    return made
