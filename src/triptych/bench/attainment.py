"""Which share of the requests of a load ended in time: within some seconds, or some times what one takes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from triptych.bench.load import Measured
from triptych.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How long a request may take."""

    value: float
    relative: bool
    """Whether the value is a multiple of what such a request takes alone; else it is seconds."""

    @classmethod
    def read(cls, flag: str, text: str) -> Self:
        """``5`` or ``2x``. Raises `ConfigError`."""
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ConfigError(f"{flag} {text!r}: must be seconds above 0, or a multiple of the latency alone like 2x")
        return cls(value=value, relative=text.endswith("x"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Attained:
    """What share of a load ended within one limit."""

    seconds: float
    scale: float | None
    """Those seconds in latencies of such a request alone; None where the limit was said in seconds."""
    share: float
    """Of all that were sent: one that failed is not in time."""

    def __str__(self) -> str:
        limit = f"{self.seconds:g} s" if self.scale is None else f"{self.scale:g}x ({self.seconds:.3g} s)"
        return f"{limit}: {self.share:.1%}"


class Objectives:
    """Limits that every load is held to. All arrangements are held to the same: what a request takes alone is measured
    once for each class of requests, on the first arrangement."""

    def __init__(self, limits: Sequence[Limit] = ()) -> None:
        self._limits = tuple(limits)
        self._alone: dict[str, float] = {}

    @classmethod
    def read(cls, flag: str, text: str) -> Self:
        """Limits with commas between. Raises `ConfigError`."""
        return cls([Limit.read(flag, part.strip()) for part in text.split(",") if part.strip()])

    def prepare(self, fields: Mapping[str, Any], alone: Callable[[], Measured]) -> None:
        """Measure a request of such ``fields`` by ``alone``, if that is needed and not known. To be called before there
        is any load. Raises `ConfigError` when the request fails."""
        if repr(fields) in self._alone or not any(limit.relative for limit in self._limits):
            return
        measured = alone()
        if measured.failures:
            raise ConfigError(f"the request that is measured alone failed: {measured.failures[0]}")
        self._alone[repr(fields)] = measured.percentile(0.5)

    def judge(self, fields: Mapping[str, Any], measured: Measured) -> tuple[Attained, ...]:
        """How a load of requests of such ``fields``, which were prepared, did."""
        judged: list[Attained] = []
        for limit in self._limits:
            seconds = limit.value * (self._alone[repr(fields)] if limit.relative else 1.0)
            scale = limit.value if limit.relative else None
            judged.append(Attained(seconds=seconds, scale=scale, share=measured.within(seconds)))
        return tuple(judged)
