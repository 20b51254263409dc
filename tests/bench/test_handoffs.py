"""The handoffs of a request's two edges are told apart, and neither has what is written into files in it."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.api.shapes import Timing
from triptych.bench.handoffs import Handoff, handoff_text, handoffs


def stage(role: str, *, pulling: float, staging: float) -> dict[str, Any]:
    """A finished stage as the server's answers have it."""
    return Timing(
        role=role, instance="i", attempt=1, waiting=9.0, pulling=pulling, pulled_bytes=1, plane="shm", running=9.0,
        compute=9.0, staging=staging,
    ).model_dump()  # fmt: skip


def request(scale: float) -> list[dict[str, Any]]:
    return [
        stage("encoder", pulling=0.0, staging=0.001 * scale),
        stage("denoiser", pulling=0.002 * scale, staging=0.003 * scale),
        stage("decoder", pulling=0.004 * scale, staging=1.3),
    ]


def test_each_edge_has_the_senders_staging_and_the_receivers_pull_a_request() -> None:
    edges = handoffs([request(1.0), request(3.0)])
    assert edges == {
        "encoder to denoiser": Handoff(staging=pytest.approx(0.002), pulling=pytest.approx(0.004)),
        "denoiser to decoder": Handoff(staging=pytest.approx(0.006), pulling=pytest.approx(0.008)),
    }
    assert handoff_text(edges) == "encoder to denoiser 2.00 + 4.00, denoiser to decoder 6.00 + 8.00"


def test_a_stage_that_was_done_twice_was_handed_over_twice() -> None:
    again = [*request(1.0), stage("decoder", pulling=0.004, staging=1.3)]
    assert handoffs([again])["denoiser to decoder"].pulling == pytest.approx(0.008)


def test_where_nothing_was_done_nothing_was_handed_over() -> None:
    assert handoffs([]) == {}
