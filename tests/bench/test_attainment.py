"""What share of a load ended in time, by limits in seconds and by multiples of what a request takes alone."""

from __future__ import annotations

import pytest

from triptych.bench.attainment import Objectives
from triptych.bench.load import Measured, Sample
from triptych.errors import ConfigError

SMALL, LARGE = {"size": "32x32"}, {"size": "64x64"}


def measured(*latencies: float, failed: int = 0) -> Measured:
    samples = [Sample(sent=1.0, ended=1.0 + latency, nbytes=1) for latency in latencies]
    lost = [Sample(sent=1.0, ended=1.5, nbytes=0, failure="the denoiser ran out of memory") for _ in range(failed)]
    return Measured(samples=(*samples, *lost), live=0.0)


def never() -> Measured:
    raise AssertionError("a request is measured that nobody needs")


def test_a_request_that_failed_is_not_in_time_however_soon_it_did() -> None:
    objectives = Objectives.read("--slo", "2")
    objectives.prepare(SMALL, never)
    (attained,) = objectives.judge(SMALL, measured(1.0, 2.0, 3.0, failed=1))
    assert (attained.seconds, attained.scale, attained.share) == (2.0, None, 0.5)
    assert str(attained) == "2 s: 50.0%"


def test_multiples_are_of_what_a_request_of_that_class_takes_alone() -> None:
    objectives = Objectives.read("--slo", "2x, 4x")
    objectives.prepare(SMALL, lambda: measured(0.5))
    objectives.prepare(LARGE, lambda: measured(3.0))
    load = measured(0.75, 1.0, 1.75, 9.0)
    assert [limit.share for limit in objectives.judge(SMALL, load)] == [0.5, 0.75]
    assert [limit.seconds for limit in objectives.judge(LARGE, load)] == [6.0, 12.0]
    assert [limit.share for limit in objectives.judge(LARGE, load)] == [0.75, 1.0]
    assert str(objectives.judge(SMALL, load)[0]) == "2x (1 s): 50.0%"


def test_the_next_arrangement_is_held_to_what_a_request_took_on_the_first() -> None:
    objectives = Objectives.read("--slo", "2x")
    objectives.prepare(SMALL, lambda: measured(0.5))
    objectives.prepare(SMALL, never)
    assert objectives.judge(SMALL, measured(0.75))[0].seconds == 1.0


def test_without_limits_nothing_is_measured_or_judged() -> None:
    objectives = Objectives.read("--slo", "")
    objectives.prepare(SMALL, never)
    assert objectives.judge(SMALL, measured(1.0)) == ()


def test_a_request_alone_that_fails_is_no_measure() -> None:
    with pytest.raises(ConfigError, match="measured alone failed: the denoiser ran out of memory"):
        Objectives.read("--slo", "2x").prepare(SMALL, lambda: measured(failed=1))
