"""What the load generator reports: every request accounted for, percentiles, and Little's law against a real count."""

from __future__ import annotations

import math

import pytest

from triptych.bench.load import Measured, Sample


def samples(*spans: tuple[float, float]) -> tuple[Sample, ...]:
    return tuple(Sample(sent=sent, ended=ended, nbytes=1) for sent, ended in spans)


def test_percentiles_are_of_finished_requests_and_failures_keep_their_reasons() -> None:
    spans = samples(*((0.0, float(n)) for n in range(1, 101)))
    failed = Sample(sent=0.0, ended=500.0, nbytes=0, failure="the denoiser ran out of memory")
    measured = Measured(samples=(*spans, failed), live=0.0)
    assert (measured.percentile(0.5), measured.percentile(0.95), measured.percentile(0.99)) == (50.0, 95.0, 99.0)
    assert len(measured.done) == 100
    assert measured.failures == ["the denoiser ran out of memory"]
    assert math.isnan(Measured(samples=(failed,), live=0.0).percentile(0.5))


@pytest.mark.parametrize(("live", "holds"), [(2.0, True), (2.4, True), (1.0, False), (4.0, False)])
def test_littles_law_compares_the_servers_count_with_the_clients_clocks(live: float, holds: bool) -> None:
    measured = Measured(samples=samples((0, 10), (0, 10)), live=live)
    assert measured.expected_live == pytest.approx(2.0)
    assert measured.little_holds is holds


def test_the_rate_counts_files_over_the_whole_time() -> None:
    measured = Measured(samples=samples((0, 4), (1, 5)), live=0.0)
    assert measured.makespan == 5
    assert measured.qps == pytest.approx(0.4)
