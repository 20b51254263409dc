"""What it takes to hand a request's state over to the next role, for each of the two edges, as requests were served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_EDGES: Final = {"encoder to denoiser": ("encoder", "denoiser"), "denoiser to decoder": ("denoiser", "decoder")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """Mean seconds a request of one edge."""

    staging: float
    """The sender copies its output to where it can be read, with checksums."""
    pulling: float
    """The receiver reads it. What the encoder has for the decoder itself is read, and counted, with the denoiser's."""


def handoffs(requests: Sequence[Iterable[Mapping[str, Any]]]) -> dict[str, Handoff]:
    """The handoffs by edge, from the server's timings of the stages of each of ``requests``."""
    stages = [stage for timings in requests for stage in timings]
    return {
        edge: Handoff(
            staging=sum(stage["staging"] for stage in stages if stage["role"] == sender) / len(requests),
            pulling=sum(stage["pulling"] for stage in stages if stage["role"] == receiver) / len(requests),
        )
        for edge, (sender, receiver) in _EDGES.items()
        if requests
    }


def handoff_text(edges: Mapping[str, Handoff]) -> str:
    """A table's entry: of each edge, milliseconds of staging and of pulling."""
    return ", ".join(f"{edge} {spent.staging * 1e3:.2f} + {spent.pulling * 1e3:.2f}" for edge, spent in edges.items())
