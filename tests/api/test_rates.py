"""How many requests a key may start in a minute."""

from __future__ import annotations

import pytest

from triptych.api.errors import TooBusy
from triptych.api.rates import Rates


def test_a_burst_is_taken_and_then_the_even_pace() -> None:
    rates = Rates(6)
    for _ in range(6):
        rates.take("a", 100.0)
    with pytest.raises(TooBusy) as refused:
        rates.take("a", 101.0)
    assert refused.value.retry_after == pytest.approx(9.0)
    rates.take("b", 101.0)
    rates.take("a", 110.0)
    with pytest.raises(TooBusy):
        rates.take("a", 110.0)


def test_a_pause_saves_up_no_more_than_a_minutes_worth() -> None:
    rates = Rates(2)
    rates.take("a", 0.0)
    for _ in range(2):
        rates.take("a", 10_000.0)
    with pytest.raises(TooBusy):
        rates.take("a", 10_000.0)


def test_several_are_checked_at_once_and_none_is_taken() -> None:
    rates = Rates(6)
    rates.check("a", 0.0, 6)
    with pytest.raises(TooBusy):
        rates.check("a", 0.0, 7)
    rates.take("a", 0.0)
    with pytest.raises(TooBusy) as refused:
        rates.check("a", 0.0, 6)
    assert refused.value.retry_after == pytest.approx(10.0)
