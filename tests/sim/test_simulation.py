"""Clusters in virtual time: many seeds with all faults at once, and the fates that each fault must have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from triptych.core.events import CancelRequest, JobState
from triptych.core.instance_events import FromServer
from triptych.core.job import Job
from triptych.core.ledger import Ledger
from triptych.core.router import Router
from triptych.ids import ROLES, InstanceId, RequestId
from triptych.sim.__main__ import main
from triptych.sim.instance import SimInstance
from triptych.sim.network import Message
from triptych.sim.plan import Plan
from triptych.sim.simulation import Simulation
from triptych.sim.world import Violation
from triptych.wire.messages import Ack, Finished, Release, RunStage, Staged, Welcome

E, D, V = ROLES
SEEDS = 300


def until(simulation: Simulation, request: RequestId, state: JobState) -> None:
    """Let time pass until a request is in a state."""
    while True:
        view = simulation.server.router.view(request)
        if view is not None and view.state is state:
            return
        simulation.step()


def swallow(simulation: Simulation, kind: type, times: int = 1) -> list[object]:
    """Lose the next messages of a kind; returns the list that they are kept in."""
    lost: list[object] = []

    def intercept(message: Message) -> bool:
        if isinstance(message.message, kind) and len(lost) < times:
            lost.append(message.message)
            return True
        return False

    simulation.network.intercept = intercept
    return lost


def quiet(**fields: object) -> Simulation:
    """A cluster of one instance a role in which nothing goes wrong by itself, without clients."""
    return Simulation(1, Plan(**({"jobs": 0, "calm_at": 0.0} | fields)))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_every_request_ends_once_and_nothing_is_left_whatever_goes_wrong(first: int) -> None:
    for seed in range(first, first + 50):
        Simulation(seed).run()


def test_the_same_seed_has_the_same_fate() -> None:
    runs = [Simulation(11) for _ in range(2)]
    fates = [run.run() for run in runs]
    assert fates[0] == fates[1]
    assert runs[0].world.now == runs[1].world.now


def test_without_faults_everything_is_done_at_the_first_attempt() -> None:
    simulation = Simulation(3, Plan(jobs=20, encoder_feeds_decoder=True, pool_bytes=10_000))
    views = simulation.run().values()
    assert [view.state for view in views] == [JobState.DONE] * 20
    assert {view.attempt for view in views} == {1}
    assert all([timing.role for timing in view.timings] == [E, D, V] for view in views)


def test_lossy_networks_and_crashes_alone_never_fail_a_request() -> None:
    for seed in range(40):
        plan = Plan(
            roles=((E,), (D,), (D,), (V,), (E, D, V)),
            drop=0.15,
            duplicate=0.15,
            jitter=0.2,
            crashes=1,
            freezes=1,
            encoder_feeds_decoder=seed % 2 == 0,
            pool_bytes=10_000,
            max_kills=4,
        )
        views = Simulation(seed, plan).run().values()
        assert {view.state for view in views} == {JobState.DONE}


def test_a_server_may_restart_in_the_middle_of_everything() -> None:
    for seed in range(20):
        views = Simulation(seed, Plan(server_restarts=3, jobs=8, pool_bytes=10_000)).run().values()
        assert [view.state for view in views] == [JobState.DONE] * 8


# -- one fault at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "victim"),
    [
        (JobState.ENCODER_RUNNING, "encoder-0"),
        (JobState.DENOISING_RUNNING, "encoder-0"),
        (JobState.DENOISING_RUNNING, "denoiser-0"),
        (JobState.DECODER_WAITING, "denoiser-0"),
        (JobState.DECODER_RUNNING, "denoiser-0"),
        (JobState.DECODER_RUNNING, "decoder-0"),
    ],
)
def test_the_death_of_an_instance_costs_time_and_not_the_request(state: JobState, victim: str) -> None:
    simulation = quiet()
    request = simulation.submit("r")
    until(simulation, request, state)
    simulation.instances[InstanceId(victim)].crash()
    simulation.run_for(1.0)
    simulation.instances[InstanceId(victim)].start()
    assert simulation.run()[request].state is JobState.DONE


def test_a_denoiser_that_dies_while_its_latents_are_queued_is_replaced_by_another_one() -> None:
    simulation = quiet(roles=((E,), (D,), (D,), (V,)), slots=1)
    first, second = simulation.submit("a"), simulation.submit("b")
    until(simulation, second, JobState.DECODER_WAITING)
    (maker,) = {timing.instance for timing in simulation.server.router.view(second).timings if timing.role is D}  # type: ignore[union-attr]
    simulation.instances[maker].crash()
    simulation.run_for(20.0)
    simulation.instances[maker].start()
    ended = simulation.run()
    assert [ended[request].state for request in (first, second)] == [JobState.DONE, JobState.DONE]


def test_when_none_is_left_the_timeout_names_the_role() -> None:
    simulation = quiet()
    request = simulation.submit("r", queue_timeout=6.0)
    until(simulation, request, JobState.DENOISING_RUNNING)
    simulation.instances[InstanceId("denoiser-0")].crash()
    simulation.run_for(10.0)
    view = simulation.server.ended[request]
    assert view.state is JobState.TIMED_OUT
    assert view.error is not None
    assert "no live denoiser instance: the last one was denoiser-0: silent for" in view.error.message
    simulation.instances[InstanceId("denoiser-0")].start()
    simulation.run()


def test_a_stage_that_is_lost_on_the_way_is_granted_again() -> None:
    simulation = quiet()
    simulation.run_for(1.0)
    lost = swallow(simulation, RunStage)
    request = simulation.submit("r")
    view = simulation.run()[request]
    assert lost
    assert (view.state, view.attempt) == (JobState.DONE, 2)
    assert view.waiting_seconds < 5.0


@pytest.mark.parametrize("kind", [Staged, Finished, Ack])
def test_an_outcome_or_its_acknowledgement_that_is_lost_is_repeated_and_nothing_is_computed_again(kind: type) -> None:
    simulation = quiet()
    lost = swallow(simulation, kind)
    request = simulation.submit("r")
    view = simulation.run()[request]
    assert lost
    assert (view.state, view.attempt, len(view.timings)) == (JobState.DONE, 1, 3)


def test_a_release_that_is_lost_leaks_nothing() -> None:
    simulation = quiet()
    lost = swallow(simulation, Release, times=2)
    simulation.submit("r")
    simulation.run()
    assert len(lost) == 2


def test_work_that_arrives_before_the_welcome_is_not_lost() -> None:
    simulation = quiet(roles=((E, D, V),))
    lost = swallow(simulation, Welcome)
    request = simulation.submit("r")
    view = simulation.run()[request]
    assert lost
    assert view.attempt == 1


def test_files_that_arrive_twice_are_stored_once() -> None:
    simulation = quiet(duplicate=1.0, calm_at=6.0)
    request = simulation.submit("r")
    assert simulation.run()[request].state is JobState.DONE
    assert [view.state for view in simulation.server.history[request]].count(JobState.DONE) == 1


def test_a_frozen_instance_loses_its_work_and_is_welcome_when_it_wakes() -> None:
    simulation = quiet(roles=((E,), (D,), (D,), (V,)))
    request = simulation.submit("r")
    until(simulation, request, JobState.DENOISING_RUNNING)
    (holder,) = [i for i in simulation.instances.values() if i.roles == (D,) and i.machine.leases]
    holder.freeze(6.0)
    ended = simulation.run()
    assert (ended[request].state, ended[request].attempt) == (JobState.DONE, 2)
    assert len(simulation.server.router.instances()) == 4


def test_the_hello_of_a_life_that_is_over_may_come_late_and_the_new_life_is_known_again_soon() -> None:
    """Symptom: a cut held it back for longer than everything else, and the cluster was judged before it had settled."""
    simulation = quiet()
    encoder = simulation.instances[InstanceId("encoder-0")]
    encoder.crash()
    simulation.network.cut([encoder.id], 2.0, holds=True)
    encoder.start()
    simulation.run_for(0.5)
    encoder.crash()
    encoder.start()
    simulation.run_for(1.0)
    assert not simulation.network.whole
    simulation.run()
    assert [view.epoch for view in simulation.server.router.instances() if view.instance == encoder.id] == [
        encoder.epoch
    ]


@pytest.mark.parametrize(
    "state",
    [
        JobState.ENCODER_WAITING,
        JobState.ENCODER_RUNNING,
        JobState.DENOISING_WAITING,
        JobState.DENOISING_RUNNING,
        JobState.DECODER_WAITING,
        JobState.DECODER_RUNNING,
    ],
)
def test_cancel_frees_everything_in_every_state(state: JobState) -> None:
    simulation = quiet(encoder_feeds_decoder=True)
    request = simulation.submit("r")
    until(simulation, request, state)
    simulation.server.feed(CancelRequest(request=request))
    assert simulation.server.ended[request].state is JobState.CANCELLED
    simulation.run_for(2.0)
    assert all(view.free_slots == view.slots for view in simulation.server.router.instances())
    assert not any(instance.pool or instance.machine.leases for instance in simulation.instances.values())
    simulation.run()


def test_a_copy_larger_than_every_pool_fails_its_request_only() -> None:
    simulation = quiet(encoder_feeds_decoder=True, pool_bytes=150, copy_bytes=100)
    request = simulation.submit("r")
    view = simulation.run()[request]
    assert view.state is JobState.FAILED
    assert "output dropped for room" in view.error.message  # type: ignore[union-attr]


# -- the simulator finds faults ---------------------------------------------------------------------------------------


def test_a_router_that_forgets_to_release_copies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SimInstance.arrive

    def deaf(self: SimInstance, message: Message) -> None:
        if not (isinstance(message, FromServer) and isinstance(message.message, Release)):
            original(self, message)

    monkeypatch.setattr(SimInstance, "arrive", deaf)
    with pytest.raises(Violation, match=r"keeps .*\n[\s\S]*replay: python -m triptych.sim --seed 1 --trace"):
        Simulation(1, Plan(jobs=1)).run()


def test_a_router_that_forgets_to_give_a_slot_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "free", lambda ledger, grant: None)
    with pytest.raises(Violation, match="not at rest: router books of"):
        Simulation(1, Plan(jobs=1)).run()


def test_a_router_that_forgets_which_outputs_are_gone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "settle", lambda job: [])
    monkeypatch.setattr(Router, "check_integrity", lambda router: None)
    simulation = quiet()
    request = simulation.submit("r")
    until(simulation, request, JobState.DECODER_WAITING)
    simulation.instances[InstanceId("denoiser-0")].crash()
    with pytest.raises((Violation, KeyError)):
        simulation.run()


def test_the_command_line_replays_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5", "--count", "2"]) == 0
    assert "2 seeds hold" in capsys.readouterr().out
    assert main(["--seed", "5", "--trace"]) == 0
    assert "encoder" in capsys.readouterr().out


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triptych.sim", "--seed", "2"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, "1 seeds hold" in done.stdout) == (0, True), done.stderr


# -- checkpoints and preemption ---------------------------------------------------------------------------------------

SAVING = Plan(
    roles=((E,), (D,), (D,), (V,)),
    steps=20,
    checkpoint_interval=0.3,
    crashes=3,
    departures=2,
    preemptions=0.5,
    max_kills=4,
)


def test_with_checkpoints_crashes_departures_and_pauses_fail_nothing_and_steps_are_taken_over() -> None:
    views = [view for seed in range(12) for view in Simulation(seed, SAVING).run().values()]
    assert {view.state for view in views} == {JobState.DONE}
    assert sum(view.resumed_from_step > 0 for view in views) > len(views) // 10


def test_a_denoiser_that_dies_costs_one_interval_and_the_time_until_that_is_noticed() -> None:
    simulation = quiet(roles=((E,), (D,), (D,), (V,)), steps=100, checkpoint_interval=1.0)
    request = simulation.submit("r")
    until(simulation, request, JobState.DENOISING_RUNNING)
    simulation.run_for(5.0)
    before = simulation.server.router.view(request)
    assert before is not None
    (maker,) = [view.instance for view in simulation.server.router.instances() if view.leases]
    simulation.instances[maker].crash()
    until(simulation, request, JobState.DENOISING_WAITING)
    until(simulation, request, JobState.DENOISING_RUNNING)
    after = simulation.server.router.view(request)
    assert after is not None
    lost = before.step - after.resumed_from_step
    assert 0 <= lost <= 1.5 / simulation.plan.step_seconds
    simulation.instances[maker].start()
    assert simulation.run()[request].state is JobState.DONE


def test_an_instance_that_leaves_hands_over_what_it_cannot_finish() -> None:
    simulation = quiet(roles=((E,), (D,), (D,), (V,)), steps=100, drain_seconds=2.0)
    request = simulation.submit("r")
    until(simulation, request, JobState.DENOISING_RUNNING)
    simulation.run_for(2.0)
    (leaver,) = [view.instance for view in simulation.server.router.instances() if view.leases]
    simulation.instances[leaver].leave(back_in=1.0)
    simulation.run_for(2.0)
    view = simulation.server.router.view(request)
    assert view is not None
    assert view.resumed_from_step > 20
    assert simulation.run()[request].attempt == 2


def test_a_full_pool_costs_checkpoints_and_nothing_else() -> None:
    plan = Plan(roles=((E,), (D,), (V,)), pool_bytes=200, steps=12, checkpoint_interval=0.05, jobs=8)
    for seed in range(10):
        views = Simulation(seed, plan).run().values()
        assert {view.state for view in views} == {JobState.DONE}
