"""Of requests that share forwards, as many advance as pay off, those first that take precedence."""

from __future__ import annotations

import pytest

from triptych.accel.batching import ForwardBatcher, Kind
from triptych.accel.companions import Calls, Companions, companions

VIDEO, IMAGE = "832x480x81", "512x512"


def step(key: str, *lengths: int) -> Calls:
    return (Kind(key=key, lengths=lengths),)


def who(steps: list[Calls], turn: int, caps: dict[object, int]) -> tuple[list[int], list[int]]:
    found = companions(steps, turn, ForwardBatcher(caps=caps))
    assert isinstance(found, Companions)
    return found.advance, found.wait


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_the_first_of_a_kind_go_first_whosever_turn_it_is(turn: int) -> None:
    assert who([step(VIDEO)] * 3, turn, {VIDEO: 1}) == ([0], [1, 2])
    assert who([step(VIDEO)] * 3, turn, {VIDEO: 2}) == ([0, 1], [2])


def test_requests_of_another_kind_are_left_out_and_do_not_wait_for_it() -> None:
    steps = [step(VIDEO), step(IMAGE), step(VIDEO), step(IMAGE)]
    caps: dict[object, int] = {VIDEO: 1, IMAGE: 8}
    assert who(steps, 0, caps) == ([0], [2])
    assert who(steps, 1, caps) == ([1, 3], [])


def test_all_advance_before_their_kind_is_known_or_measured() -> None:
    assert who([(), ()], 0, {}) == ([0, 1], [])
    assert who([step(VIDEO), ()], 1, {VIDEO: 1}) == ([0, 1], [])
    assert who([step(VIDEO), step(VIDEO), ()], 0, {VIDEO: 1}) == ([0, 2], [1])
    assert who([step(VIDEO), step(VIDEO)], 0, {}) == ([0, 1], [])


def test_texts_of_several_lengths_share_a_turn_where_that_pays_off() -> None:
    steps = [step(IMAGE, 20), step(IMAGE, 33), step(IMAGE, 20)]
    mixed = ("of several lengths", IMAGE)
    assert who(steps, 0, {mixed: 4, IMAGE: 4}) == ([0, 1, 2], [])
    assert who(steps, 0, {mixed: 1, IMAGE: 4}) == ([0, 2], [])
    assert who(steps, 1, {mixed: 1, IMAGE: 4}) == ([1], [])


def test_a_step_that_calls_two_models_is_shared_if_one_of_them_gains() -> None:
    both = (Kind(key="a", lengths=()), Kind(key="b", lengths=()))
    assert who([both, both], 0, {"a": 1, "b": 2}) == ([0, 1], [])
    assert who([both, both], 0, {"a": 1, "b": 1}) == ([0], [1])
