from __future__ import annotations

import itertools

import pytest

from triptych.core.events import JobState
from triptych.core.states import (
    COUNTS_AS_RUNNING,
    COUNTS_AS_WAITING,
    FINISHED,
    RUNNING,
    TERMINAL,
    TRANSITIONS,
    WAITING,
    IllegalTransition,
    role_of,
    transition,
)
from triptych.ids import ROLES, Role

HAPPY = (
    "pending encoder_waiting encoder_running encoder_done denoising_waiting denoising_running denoising_done "
    "decoder_waiting decoder_running done"
)


def test_a_request_can_walk_from_submission_to_done() -> None:
    states = [JobState(name) for name in HAPPY.split()]
    for old, new in itertools.pairwise(states):
        assert transition(old, new) is new


def test_every_state_has_a_row_and_every_pair_outside_the_table_is_refused() -> None:
    assert TRANSITIONS.keys() == set(JobState)
    for old, new in itertools.product(JobState, JobState):
        if new in TRANSITIONS[old]:
            assert transition(old, new) is new
        else:
            with pytest.raises(IllegalTransition, match=rf"{old} cannot become {new}"):
                transition(old, new)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_terminal_states_are_never_left(state: JobState) -> None:
    assert not TRANSITIONS[state]


@pytest.mark.parametrize("state", sorted(set(JobState) - TERMINAL))
def test_every_live_state_can_be_aborted(state: JobState) -> None:
    assert {JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED} <= TRANSITIONS[state]


@pytest.mark.parametrize("role", ROLES)
def test_a_running_stage_can_go_back_to_its_own_queue_and_to_those_before(role: Role) -> None:
    for earlier in ROLES[: ROLES.index(role) + 1]:
        assert transition(RUNNING[role], WAITING[earlier]) is WAITING[earlier]


def test_only_done_needs_the_decoder_to_have_run() -> None:
    assert [old for old in JobState if JobState.DONE in TRANSITIONS[old]] == [JobState.DECODER_RUNNING]


def test_states_belong_to_roles_and_to_one_clock_at_most() -> None:
    for role in ROLES:
        assert [role_of(table[role]) for table in (WAITING, RUNNING, FINISHED)] == [role] * 3
    assert role_of(JobState.PENDING) is None
    assert {RUNNING[role] for role in ROLES} == COUNTS_AS_RUNNING
    assert {JobState.PENDING, *(WAITING[role] for role in ROLES)} == COUNTS_AS_WAITING
