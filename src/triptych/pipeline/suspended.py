"""Greenlets that computations stop in: the same settings hold there as where they were made."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from greenlet import greenlet

from triptych.accel.batching import Call


def suspendable(compute: Callable[..., Any]) -> greenlet:
    """A greenlet that runs ``compute``, not begun.

    A greenlet has a context of its own, which is empty. Torch keeps its settings in context variables, so that those
    of this thread would not hold in it; hence it gets a copy.
    """
    made = greenlet(compute)
    made.gr_context = contextvars.copy_context()
    return made


def answered(run: greenlet, call: Call) -> Any:
    """Go on with ``run``, which had stopped at ``call``, with what came of that; gives what `greenlet.switch` does.

    The call keeps neither: an error that can be reached from where it was raised is kept until Python next looks for
    cycles, and all tensors of the request with it.
    """
    result, error = call.result, call.error
    call.result = call.error = None
    try:
        return run.switch(result) if error is None else run.throw(error)
    finally:
        del result, error
