"""The flow shift: a request parameter where the scheduler's schedule is bent by a number of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

FLOW_SHIFT: Final = "flow_shift"
"""Name of the request parameter."""

_ENTRIES: Final = ("flow_shift", "shift")
"""What schedulers call it in their configs."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A scheduler's own shift, and the entry of its config that holds it."""

    entry: str
    value: float


def shift_of(scheduler: Any) -> Shift | None:
    """The shift of ``scheduler``; None where it has none, or computes it from the size of each request."""
    config: Any = getattr(scheduler, "config", None)
    if config is None or config.get("use_dynamic_shifting") or config.get("use_flow_sigmas") is False:
        return None
    for entry in _ENTRIES:
        value = config.get(entry)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Shift(entry, float(value))
    return None


def shifted(scheduler: Any, params: Mapping[str, Any]) -> Any:
    """``scheduler``, or where the request wants another shift one like it with that."""
    own, wanted = shift_of(scheduler), params.get(FLOW_SHIFT)
    if own is None or wanted is None or wanted == own.value:
        return scheduler
    # Made anew, for some schedulers bend the range of their schedule when they are made.
    return type(scheduler).from_config(scheduler.config, **{own.entry: float(wanted)})
