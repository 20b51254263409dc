"""How long denoisers stand still between two requests, the second of which was there before the first was over."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final, Self

import httpx

_HEARTBEATS_SECONDS: Final = 1.5
"""Instances report about once a second: what the server knows after this is not older than the call."""
_COUNT = re.compile(
    r'^triptych_(turnovers|turnover_seconds)_total\{instance="[^"]*denoiser[^"]*"\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Turnovers:
    """Of all denoisers of a server since they began."""

    count: int
    seconds: float

    @classmethod
    def read(cls, url: str, api_key: str | None) -> Self:
        """What the server at ``url`` says when its instances have reported once more."""
        time.sleep(_HEARTBEATS_SECONDS)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        text = httpx.get(f"{url}/metrics", headers=headers, trust_env=False).raise_for_status().text
        found = _COUNT.findall(text)
        return cls(
            int(sum(float(value) for name, value in found if name == "turnovers")),
            sum(float(value) for name, value in found if name == "turnover_seconds"),
        )

    def __sub__(self, before: Turnovers) -> Turnovers:
        return Turnovers(self.count - before.count, self.seconds - before.seconds)
