"""What a request costs in each stage: its size, and the seconds that such sizes took lately.

A stage's time is its units of work times the time of one, and that follows a power of the number of tokens: about 1
where linear layers and convolutions prevail, up to 2 where attention does. Both are learnt from the stages that end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any, Final, assert_never

from triptych.ids import ROLES, Role
from triptych.wire.schema import RequestSchema

REMEMBERED: Final = 32
"""Ended stages of a role from which the next ones are foretold."""

_POWERS: Final[Mapping[Role, tuple[float, float, float]]] = {
    Role.ENCODER: (0.0, 0.0, 2.0),
    Role.DENOISER: (0.5, 1.0, 2.0),
    Role.DECODER: (0.5, 1.0, 2.0),
}
"""Lowest power, the one taken while only one size was seen, and the highest: a few noisy measurements could mean
anything. Most of an encoder's work is the text, whatever is made of it."""

_LEAST: Final = 1e-6
"""Seconds; nothing takes less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A request as far as its cost depends on it."""

    steps: int
    branches: int
    """Forwards of one step: two with guidance."""
    outputs: int
    """Videos or images of one prompt."""
    tokens: int
    """Latent positions of one output."""

    def units(self, role: Role) -> int:
        """Units of work: forwards of the denoiser, outputs of the decoder, prompts of the encoder."""
        match role:
            case Role.ENCODER:
                return 1
            case Role.DENOISER:
                return self.steps * self.branches * self.outputs
            case Role.DECODER:
                return self.outputs
            case _:
                assert_never(role)


def size_of(schema: RequestSchema | None, params: Mapping[str, Any]) -> Size:
    """The size of a validated request; what it does not say counts as 1."""
    handoff = None if schema is None else schema.handoff
    spatial, temporal = (handoff.spatial, handoff.temporal) if handoff is not None else (1, 1)
    frames = 1 + (_number(params, "num_frames") - 1) // temporal
    area = max(1, _number(params, "height") // spatial) * max(1, _number(params, "width") // spatial)
    guidance = params.get("guidance_scale")
    guided = isinstance(guidance, int | float) and guidance > 1
    return Size(
        steps=_number(params, "num_inference_steps"),
        branches=2 if guided else 1,
        outputs=_number(params, "n"),
        tokens=frames * area,
    )


def staged_bytes(schema: RequestSchema | None, params: Mapping[str, Any], role: Role) -> int:
    """Bytes of what a stage of a validated request puts into its pool and grows with the request; 0 when unknown."""
    handoff = None if schema is None else schema.handoff
    if handoff is None or not {"height", "width"} <= params.keys():
        return 0
    frames = 1 + (_number(params, "num_frames") - 1) // handoff.temporal
    area = (_number(params, "height") // handoff.spatial) * (_number(params, "width") // handoff.spatial)
    one = handoff.item_bytes * frames * area
    match role:
        case Role.ENCODER:
            return one * handoff.condition_channels
        case Role.DENOISER:
            return one * handoff.channels * _number(params, "n")
        case Role.DECODER:
            return 0
        case _:
            assert_never(role)


def _number(params: Mapping[str, Any], name: str) -> int:
    value = params.get(name)
    return max(1, int(value)) if isinstance(value, (int, float)) else 1


class Costs:
    """Learns from ended stages; knows nothing of a role, and says so, until one of its stages has ended."""

    def __init__(self) -> None:
        self._seen: dict[Role, deque[tuple[int, float]]] = {role: deque(maxlen=REMEMBERED) for role in ROLES}
        """Tokens, and seconds of one unit."""
        self._laws: dict[Role, tuple[float, float]] = {}
        """Logarithm of a unit's seconds at one token, and the power; of roles that have learnt nothing since."""

    def learn(self, role: Role, size: Size, seconds: float, *, share: float = 1.0) -> None:
        """A stage has taken so long for this share of its work."""
        self._seen[role].append((size.tokens, seconds / (size.units(role) * share)))
        self._laws.pop(role, None)

    def seconds(self, role: Role, size: Size) -> float | None:
        """What a whole stage of this size is going to take."""
        if not self._seen[role]:
            return None
        law = self._laws.get(role)
        if law is None:
            law = self._laws[role] = _law(self._seen[role], *_POWERS[role])
        base, power = law
        return size.units(role) * exp(base + power * log(size.tokens))


def _law(seen: deque[tuple[int, float]], low: float, power: float, high: float) -> tuple[float, float]:
    """The straight line through the logarithms, its slope within bounds."""
    points = [(log(tokens), log(max(_LEAST, seconds))) for tokens, seconds in seen]
    x = sum(point[0] for point in points) / len(points)
    y = sum(point[1] for point in points) / len(points)
    spread = sum((a - x) ** 2 for a, _ in points)
    if spread > 0:
        power = min(high, max(low, sum((a - x) * (b - y) for a, b in points) / spread))
    return y - power * x, power
