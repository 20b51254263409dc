"""The two time limits that a request may set for itself, within what the operator allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from triptych.api.body import Body
from triptych.api.openapi_params import nullable
from triptych.api.validation import read_number, refuse
from triptych.config import ServerConfig

TIMEOUTS: Final[Mapping[str, str]] = {
    "queue_timeout": "Seconds that the request may wait in all; then it fails.",
    "run_timeout": "Seconds that the request may be computed in all, over all attempts; then it fails.",
}
"""Field to what it means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Time limits of one request, in seconds."""

    queue: float
    run: float

    @property
    def total(self) -> float:
        """How long it may take in all."""
        return self.queue + self.run


def caps(config: ServerConfig) -> dict[str, float]:
    """The most that each field may ask for, in seconds."""
    return {
        "queue_timeout": max(config.queue_timeout, config.timeout_cap),
        "run_timeout": max(config.run_timeout, config.timeout_cap),
    }


def read_timeouts(body: Body, config: ServerConfig) -> tuple[Timeouts, Body]:
    """The limits that ``body`` asks for or else the server's own, and its other fields. Raises `BadRequest`."""
    fields = dict(body.fields)
    found: dict[str, float] = {"queue_timeout": config.queue_timeout, "run_timeout": config.run_timeout}
    for name, most in caps(config).items():
        value = fields.pop(name, None)
        if value is None:
            continue
        seconds = read_number(name, value, form=body.form)
        if not 0 < seconds <= most:
            refuse(name, value, f"more than 0 and at most {most:g} seconds")
        found[name] = float(seconds)
    return Timeouts(queue=found["queue_timeout"], run=found["run_timeout"]), replace(body, fields=fields)


def timeout_schemas(most: Mapping[str, float], *, form: bool) -> dict[str, Any]:
    """JSON Schema of the fields."""
    fields: dict[str, Any] = {
        name: {"type": "number", "exclusiveMinimum": 0, "maximum": most[name], "description": text}
        for name, text in TIMEOUTS.items()
    }
    return fields if form else {name: nullable(found) for name, found in fields.items()}
