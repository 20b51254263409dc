"""How long denoisers stood still is read out of what a server really renders, and is never 0 for want of an answer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client import generate_latest

from triptych.bench.load import live_requests
from triptych.bench.turnover import Turnovers, idle_text
from triptych.core.events import JobState
from triptych.ids import InstanceId, Role
from triptych.server.metrics import Gauges, Metrics
from triptych.wire.messages import Counts
from triptych.worker.lifecycle import instance_id


def rendered(counts: Mapping[InstanceId, Counts] | None = None, states: Mapping[JobState, int] | None = None) -> str:
    """The text at ``/metrics`` of a server that knows these."""
    gauges = Gauges(
        states=states or {}, failing={}, queues={}, slots_used={}, slots_free={}, up={}, quarantined={},
        counts=counts or {},
    )  # fmt: skip
    return generate_latest(Metrics(lambda: gauges).registry).decode()


def named(*roles: Role) -> InstanceId:
    return instance_id(roles, "host", f"tcp://127.0.0.1:{9000 + len(roles)}")


def test_turnovers_are_those_of_every_instance_that_denoises() -> None:
    text = rendered(
        {
            named(Role.ENCODER): Counts(turnovers=100, turnover_seconds=100.0),
            named(Role.DENOISER): Counts(turnovers=3, turnover_seconds=0.5),
            named(Role.DENOISER, Role.DECODER): Counts(turnovers=2, turnover_seconds=0.25),
        }
    )
    assert Turnovers.parse(text) == Turnovers(5, 0.75)


def test_a_load_has_those_that_came_since_the_one_before() -> None:
    before, after = (
        Turnovers.parse(rendered({named(Role.DENOISER): Counts(turnovers=count, turnover_seconds=seconds)}))
        for count, seconds in ((2, 0.5), (6, 1.5))
    )
    turned = after - before
    assert turned.count == 4
    assert turned.mean == pytest.approx(0.25)
    assert idle_text(turned.count, turned.mean) == "250.00"


def test_none_are_told_apart_from_a_server_that_says_nothing_of_them() -> None:
    none = Turnovers.parse(rendered({named(Role.DENOISER): Counts()}))
    assert (none.count, none.mean) == (0, 0.0)
    assert idle_text(none.count, none.mean) == ""
    silent = Turnovers.parse(rendered({named(Role.ENCODER): Counts(turnovers=1)}))
    for unknown in (silent, silent - none, none - silent):
        assert (unknown.count, unknown.mean) == (None, None)
        assert idle_text(unknown.count, unknown.mean) == "not told"


def test_requests_that_are_live_are_all_but_those_that_ended() -> None:
    states = {JobState.ENCODER_RUNNING: 2, JobState.DENOISING_WAITING: 3, JobState.DONE: 50, JobState.FAILED: 7}
    assert live_requests(rendered(states=states)) == 5
    assert live_requests(rendered()) == 0
