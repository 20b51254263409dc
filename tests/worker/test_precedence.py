"""Who goes first: the short one, but no one for ever."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from triptych.worker.precedence import Precedence


@dataclass(eq=False)
class Request:
    steps: int
    begins: int
    """After so many turns."""
    due: int = 0
    ended: int = 0


def served(requests: list[Request], *, places: int, joined: int = 1) -> None:
    """Serve ``requests`` as they come, up to ``places`` at a time, of which ``joined`` have a step in each turn."""
    precedence, running, turn = Precedence(places), list[tuple[Request, int]](), 0
    coming = list(requests)
    while coming or running:
        while coming and len(running) < places and coming[0].begins <= turn:
            request = coming.pop(0)
            request.due = precedence.due(request.steps)
            running.append((request, request.steps))
        running.sort(key=lambda entry: entry[0].due)
        turn += 1
        group, late = running[:joined], running[joined:]
        precedence.computed(len(group))
        running = [(request, left - 1) for request, left in group if left > 1] + late
        for request, left in group:
            if left == 1:
                request.ended = turn


def test_equally_long_ones_end_one_after_the_other() -> None:
    requests = [Request(50, 0), Request(50, 1), Request(50, 2)]
    served(requests, places=3)
    assert [request.ended for request in requests] == [50, 100, 150]


@pytest.mark.parametrize("begins", [3, 250, 599])
def test_a_short_one_passes_by_however_long_the_others_have_been_there(begins: int) -> None:
    short = Request(4, begins)
    long = [Request(200, 0), Request(200, 1), Request(200, 2)]
    served([*long, short], places=4)
    assert short.ended == begins + 4
    assert [request.ended for request in long] == sorted(request.ended for request in long)
    assert long[-1].ended == 604


@pytest.mark.parametrize("places", [2, 4, 8])
def test_short_ones_that_keep_coming_do_not_hold_up_a_long_one_for_longer_than_full_rounds(places: int) -> None:
    long = Request(100, 0)
    served([long, *(Request(4, 4 * number) for number in range(1000))], places=places)
    assert long.ended <= places * long.steps + long.steps


def test_those_that_are_joined_are_the_shortest_and_as_many_as_pay_off() -> None:
    requests = [Request(100, 0), Request(100, 0), Request(10, 5), Request(10, 5)]
    served(requests, places=4, joined=2)
    assert [request.ended for request in requests] == [110, 110, 15, 15]
