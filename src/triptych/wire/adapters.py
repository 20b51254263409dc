"""How a request names LoRA adapters: ``NAME`` or ``NAME:SCALE``, several with commas between."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from triptych.ids import MAX_ADAPTER_SCALE

_SCALE = re.compile(r"[+-]?([0-9]{1,3}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE]-[0-9]{1,3})?")
"""However many digits a number has: as it comes out of JSON."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter at work in a request."""

    name: str
    scale: float | None
    """None: as it was launched."""


def read_adapters(text: str, known: Collection[str]) -> tuple[Adapter, ...]:
    """The adapters that ``text`` names, in its order. Raises `ValueError` that says what would be accepted."""
    found: dict[str, Adapter] = {}
    for part in text.split(","):
        name, colon, scale = part.strip().partition(":")
        if name not in known:
            raise ValueError(f"{name[:64]!r} is none of the adapters served here: {', '.join(known)}")
        if name in found:
            raise ValueError(f"{name} is named twice")
        if colon and not (_SCALE.fullmatch(scale) and abs(float(scale)) <= MAX_ADAPTER_SCALE):
            raise ValueError(f"{scale[:64]!r} is not a scale of {name}: a number within {MAX_ADAPTER_SCALE:g} of 0")
        found[name] = Adapter(name, float(scale) if colon else None)
    return tuple(found.values())
