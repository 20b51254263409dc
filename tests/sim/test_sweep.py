"""Thousands of clusters in virtual time, in which all that can go wrong does; and how a sweep tells what it found."""

from __future__ import annotations

import resource

import pytest

from triptych.core.events import JobState
from triptych.core.ledger import Ledger
from triptych.core.states import FINISHED, TRANSITIONS
from triptych.ids import Role
from triptych.sim.coverage import UNREACHABLE, Coverage, Fault
from triptych.sim.simulation import Simulation
from triptych.sim.sweep import run_seeds, sweep
from triptych.sim.world import Violation

FEWEST, MOST, STEP = 3_000, 10_000, 1_000
"""Seeds: more than the fewest only while something rare has not happened yet."""
CPU_SECONDS_A_SEED = 0.048
"""What one may cost: twice what two cores give, for ten thousand of them, in two minutes, since a core that is shared
is slower."""


@pytest.mark.timeout(1500)
@pytest.mark.slow
def test_thousands_of_seeds_hold_and_leave_no_fault_and_no_transition_out() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    coverage, seeds = sweep(0, FEWEST), FEWEST
    while coverage.missing() and seeds < MOST:
        coverage.add(sweep(seeds, STEP))
        seeds += STEP
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < seeds * CPU_SECONDS_A_SEED
    assert coverage.missing() == []
    assert sum(coverage.ends.values()) > 3 * seeds


def test_a_sweep_says_how_far_it_came_and_sums_up_what_it_saw() -> None:
    told: list[int] = []
    coverage = sweep(500, 120, processes=2, told=told.append)
    assert told == sorted(told)
    assert told[-1] == 620
    assert coverage == run_seeds(500, 120)  # a process has its own order of sets, and yet the same fate


def test_a_seed_that_does_not_hold_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "free", lambda ledger, grant: None)
    with pytest.raises(Violation, match=r"replay: python -m triptych.sim --seed 7 --trace"):
        run_seeds(7, 5)


def test_any_error_of_a_machine_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ledger: Ledger, *_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Ledger, "grant", broken)
    with pytest.raises(Violation, match="KeyError: 'lost'"):
        Simulation(3).run()


def test_a_move_that_the_table_does_not_know_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.core.job.transition", lambda old, new: new)
    monkeypatch.setitem(FINISHED, Role.ENCODER, JobState.DENOISING_DONE)
    with pytest.raises(Violation, match="went from encoder_running to denoising_done"):
        run_seeds(0, 5)


def test_coverage_names_what_never_happened() -> None:
    legal = {(old, new) for old, following in TRANSITIONS.items() for new in following}
    assert len(Coverage().missing()) == len(Fault) + len(legal - UNREACHABLE)
