"""Random states of a run: its own, whatever others draw."""

from __future__ import annotations

import torch

from triptych.pipeline.randomness import GlobalRandomness, Randomness

CPU = torch.device("cpu")


def test_equal_seeds_draw_equal_numbers_whatever_happens_between() -> None:
    first, second = Randomness(5, CPU), Randomness(5, CPU)
    drawn: list[list[float]] = [[], []]
    for _ in range(3):
        for i, run in enumerate((first, second)):
            torch.manual_seed(1000 + i)
            with run.installed():
                drawn[i] += [torch.rand(()).item(), torch.rand((), generator=run.generator).item()]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 6


def test_the_process_keeps_its_own_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(())
    with Randomness(9, CPU).installed():
        torch.manual_seed(77)
        torch.rand(100)
    assert torch.equal(torch.stack([first, torch.rand(())]), expected)


def test_a_replay_takes_over_what_a_call_drew() -> None:
    recorded, replayed = Randomness(1, CPU), Randomness(1, CPU)
    with recorded.installed():
        before = recorded.states()
        torch.rand(7)
        torch.rand(5, generator=recorded.generator)
        states = recorded.changed(before)
        expected = torch.rand(3), torch.rand(3, generator=recorded.generator)
    with replayed.installed():
        replayed.advance(states)
        found = torch.rand(3), torch.rand(3, generator=replayed.generator)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_nothing_is_noted_of_a_call_that_draws_nothing() -> None:
    run = Randomness(1, CPU)
    with run.installed():
        assert run.changed(run.states()) == [None, None]


def test_states_are_the_runs_own_whether_it_computes_or_not() -> None:
    run = GlobalRandomness(1, CPU)
    before = run.states()
    assert run.changed(before) == [None]
    with run.installed():
        torch.rand(3)
        (inside,) = run.changed(before)
    torch.rand(5)
    (outside,) = run.changed(before)
    assert inside is not None
    assert outside is not None
    assert torch.equal(inside, outside)
