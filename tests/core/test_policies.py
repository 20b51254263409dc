from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from triptych.core.policies import POLICIES, least_work, max_free_slots, round_robin


@dataclass(frozen=True)
class Seat:
    ordinal: int
    free: int = 1
    busy: float = 0.0


def work(seat: Seat) -> float:
    return seat.busy


def test_round_robin_takes_turns_in_joining_order() -> None:
    seats = [Seat(1), Seat(2), Seat(5)]
    last, chosen = 0, []
    for _ in range(6):
        last = round_robin(seats, last, work).ordinal
        chosen.append(last)
    assert chosen == [1, 2, 5, 1, 2, 5]


def test_round_robin_skips_who_has_no_room_and_does_not_favour_its_neighbour() -> None:
    assert round_robin([Seat(1), Seat(3)], 1, work).ordinal == 3
    assert round_robin([Seat(1), Seat(3)], 3, work).ordinal == 1


def test_max_free_slots_takes_the_emptiest() -> None:
    assert max_free_slots([Seat(1, 1), Seat(2, 4), Seat(3, 2)], 0, work).ordinal == 2


def test_max_free_slots_shares_evenly_among_equals() -> None:
    seats = [Seat(1, 2), Seat(2, 2), Seat(3, 2)]
    last, chosen = 0, []
    for _ in range(9):
        last = max_free_slots(seats, last, work).ordinal
        chosen.append(last)
    assert Counter(chosen) == {1: 3, 2: 3, 3: 3}


def test_least_work_takes_who_is_done_first_and_the_emptiest_among_equals() -> None:
    assert least_work([Seat(1, 3, 600.0), Seat(2, 1, 5.0), Seat(3, 2, 30.0)], 0, work).ordinal == 2
    assert least_work([Seat(1, 1), Seat(2, 2), Seat(3, 2)], 2, work).ordinal == 3


def test_every_policy_of_the_settings_exists() -> None:
    assert POLICIES.keys() == {"round_robin", "max_free_slots", "least_work"}
