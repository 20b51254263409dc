"""A rank that is lost while all ranks prepare a request ends the instance, as it does elsewhere."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.worker.ranks.pair import Pair
from tests.worker.ranks.row import Row, asked, misled
from triptych.parallelism import Parallelism
from triptych.worker.ranks.leader import RanksApart
from triptych.worker.ranks.orders import Prepare


@pytest.mark.parametrize(("what", "reason"), [("kill", "its process ended"), ("stop", "its process is stopped")])
def test_a_rank_that_is_lost_while_it_prepares_ends_the_instance(
    what: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = Pair(Parallelism())
    try:
        (follower,) = lone.leader.followers
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP

        def lose(order: Prepare) -> Prepare:
            psutil.Process(follower.process.pid).send_signal(number)
            return order

        misled(lone, monkeypatch, Prepare, lose, number=1)
        row = Row(lone)
        for one in asked(lone, 2):
            row.add(*one)
        row.start()
        lost = lone.lost()
        assert lost.thread == "rank 1"
        assert reason in lost.reason
        lone.leader.close()  # as its process ends
        assert RanksApart.__name__ in row.died().reason
    finally:
        lone.close()
