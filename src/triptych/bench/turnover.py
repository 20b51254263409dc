"""How long denoisers stand still between two requests, the second of which was there before the first was over."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

_HEARTBEATS_SECONDS: Final = 1.5
"""Instances report about once a second: what the server knows after this is not older than the call."""
_COUNT: Final = "triptych_turnovers_total"
_SECONDS: Final = "triptych_turnover_seconds_total"


@dataclass(frozen=True, slots=True)
class Turnovers:
    """Of all denoisers of a server since they began."""

    count: int | None
    """None: the server's metrics say nothing of them, which is not the same as none."""
    seconds: float

    @classmethod
    def read(cls, url: str, api_key: str | None) -> Self:
        """What the server at ``url`` says when its instances have reported once more."""
        time.sleep(_HEARTBEATS_SECONDS)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        return cls.parse(httpx.get(f"{url}/metrics", headers=headers, trust_env=False).raise_for_status().text)

    @classmethod
    def parse(cls, metrics: str) -> Self:
        """What a server's ``metrics`` say. An instance's name begins with its roles."""
        found: dict[str, list[float]] = {_COUNT: [], _SECONDS: []}
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name in found and "denoiser" in sample.labels.get("instance_id", ""):
                    found[sample.name].append(sample.value)
        counts, seconds = found.values()
        return cls(int(sum(counts)) if counts and seconds else None, sum(seconds))

    def __sub__(self, before: Turnovers) -> Turnovers:
        if self.count is None or before.count is None:
            return Turnovers(None, 0.0)
        return Turnovers(self.count - before.count, self.seconds - before.seconds)

    @property
    def mean(self) -> float | None:
        """Seconds that a denoiser stood still; None where nothing is known, 0 where nothing turned."""
        if self.count is None:
            return None
        return self.seconds / self.count if self.count else 0.0


def idle_text(count: int | None, seconds: float | None) -> str:
    """A table's entry for the mean ``seconds`` of ``count`` turnovers, in milliseconds; empty when there were none."""
    if count is None or seconds is None:
        return "not told"
    return f"{seconds * 1e3:.2f}" if count else ""
