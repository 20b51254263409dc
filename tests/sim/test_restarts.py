"""Server restarts in virtual time: nothing that an instance has under way or has done is done once more."""

from __future__ import annotations

from collections import Counter

import pytest

from triptych.core.events import JobState, PauseRequest, ResumeRequest
from triptych.ids import ROLES
from triptych.sim.plan import Plan
from triptych.sim.simulation import Simulation
from triptych.wire.messages import Cancel

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


def test_a_request_that_is_paused_while_its_denoiser_cannot_hear_it_stops_after_the_restart() -> None:
    for seed in range(10):
        plan = Plan(jobs=0, arrivals=0.0, calm_at=0.0, steps=40, pool_bytes=100_000)
        simulation = Simulation(seed, plan)
        request = simulation.submit("r")
        while simulation.server.history[request][-1].state is not JobState.DENOISING_RUNNING:
            simulation.step()
        simulation.network.intercept = lambda message: isinstance(getattr(message, "message", None), Cancel)
        simulation.server.feed(PauseRequest(request=request))
        simulation.server.crash(back_in=0.5)
        simulation.run_for(0.4)
        simulation.network.intercept = None
        simulation.run_for(30.0)
        view = simulation.server.router.view(request)
        assert view is not None, f"seed {seed}: it went on to its end"
        assert (view.paused, view.state) == (True, JobState.DENOISING_WAITING), f"seed {seed}"
        simulation.server.feed(ResumeRequest(request=request))
        assert simulation.run()[request].state is JobState.DONE, f"seed {seed}"


def test_files_that_are_stored_make_a_request_done_and_a_deletion_holds_whenever_the_server_dies() -> None:
    for seed in range(25):
        plan = Plan(jobs=10, deletions=0.5, killed_midway=0.5, server_downtime=1.0, pool_bytes=100_000)
        simulation = Simulation(seed, plan)
        ends = simulation.run()
        assert {view.state for view in ends.values()} <= {JobState.DONE, JobState.CANCELLED}, f"seed {seed}"
        assert not simulation.server.deleted & simulation.server.journal.keys(), f"seed {seed}: not deleted to the end"


def test_what_a_killed_server_had_no_time_to_write_costs_at_most_work() -> None:
    for seed in range(25):
        plan = Plan(server_restarts=4, jobs=10, pool_bytes=100_000, unjournalled=0.5)
        views = Simulation(seed, plan).run().values()
        assert [view.state for view in views] == [JobState.DONE] * 10, f"seed {seed}"
