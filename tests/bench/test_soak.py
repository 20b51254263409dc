"""The soak's judgement: what counts as growth, and what a short one finds in a pool that is well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.nursery import forking
from triptych.bench.soak import Held, Row, Soak, run_soak


def row(before: int, after: int, descriptors: tuple[int, int] = (9, 9)) -> Row:
    return Row(
        name="decoder-0",
        before=Held(resident=before, descriptors=descriptors[0], threads=3),
        after=Held(resident=after, descriptors=descriptors[1], threads=3),
    )


@pytest.mark.parametrize(
    ("soak", "complaint"),
    [
        (Soak(rows=[row(1000, 1009)], requests=1, seconds=1, segments=(0, 0)), None),
        (Soak(rows=[row(1000, 1010)], requests=1, seconds=1, segments=(0, 0)), "memory grew by 1.00%"),
        (Soak(rows=[row(1000, 900, (9, 10))], requests=1, seconds=1, segments=(0, 0)), "9 descriptors became 10"),
        (Soak(rows=[], requests=1, seconds=1, segments=(1, 2)), "1 shared-memory segments became 2"),
    ],
)
def test_what_grew_is_named(soak: Soak, complaint: str | None) -> None:
    found = soak.judge()
    assert found == [] if complaint is None else complaint in found[0]


@pytest.mark.slow
def test_a_pool_under_load_ends_every_request_and_leaves_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with forking():
        soak = run_soak(8.0, in_flight=3)
    assert soak.requests > 0
    assert {row.name for row in soak.rows} == {"server", "encoder-0", "denoiser-0", "decoder-0"}
    assert soak.segments[0] == 3  # a pool of each role
    # So short a time says nothing of memory, threads and descriptors.
    assert [found for found in soak.judge() if "segments" in found or "ended" in found] == []
