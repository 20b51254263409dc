"""Server restarts in virtual time: nothing that an instance has under way or has done is done once more."""

from __future__ import annotations

from collections import Counter

import pytest

from triptych.core.events import JobState
from triptych.ids import ROLES
from triptych.sim.plan import Plan
from triptych.sim.simulation import Simulation

E, D, V = ROLES


def begun(simulation: Simulation) -> Counter[tuple[str, str]]:
    """How often each stage of each request was begun on any instance."""
    leases = (lease for instance in simulation.instances.values() for lease in instance.server_of)
    return Counter((lease.request, lease.role.value) for lease in leases)


@pytest.mark.parametrize("encoder_feeds_decoder", [False, True])
def test_stages_are_begun_once_however_often_the_server_is_restarted(encoder_feeds_decoder: bool) -> None:
    for seed in range(25):
        plan = Plan(
            roles=((E,), (D,), (D,), (V,)),
            server_restarts=4,
            jobs=10,
            pool_bytes=100_000,
            encoder_feeds_decoder=encoder_feeds_decoder,
        )
        simulation = Simulation(seed, plan)
        views = simulation.run().values()
        assert [view.state for view in views] == [JobState.DONE] * 10, f"seed {seed}"
        assert set(begun(simulation).values()) == {1}, f"seed {seed}: {begun(simulation).most_common(3)}"


def test_a_run_timeout_strikes_though_the_server_is_killed_again_and_again() -> None:
    for seed in range(10):
        plan = Plan(server_restarts=12, calm_at=90.0, jobs=1, arrivals=0.1, steps=2000, run_timeout=20.0)
        simulation = Simulation(seed, plan)
        while not simulation.server.ended:
            simulation.step()
            assert simulation.world.now < 20.0 + 5.0 * 12, f"seed {seed}"
        (view,) = simulation.server.ended.values()
        assert view.state is JobState.TIMED_OUT, f"seed {seed}"


def test_what_a_killed_server_had_no_time_to_write_costs_at_most_work() -> None:
    for seed in range(25):
        plan = Plan(server_restarts=4, jobs=10, pool_bytes=100_000, unjournalled=0.5)
        views = Simulation(seed, plan).run().values()
        assert [view.state for view in views] == [JobState.DONE] * 10, f"seed {seed}"
