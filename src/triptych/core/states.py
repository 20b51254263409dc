"""The life of a request as one table: which state may follow which, and how states belong to roles."""

from __future__ import annotations

from triptych.core.events import JobState
from triptych.errors import TriptychError
from triptych.ids import Role

WAITING: dict[Role, JobState] = {
    Role.ENCODER: JobState.ENCODER_WAITING,
    Role.DENOISER: JobState.DENOISING_WAITING,
    Role.DECODER: JobState.DECODER_WAITING,
}
"""The state of a request that waits for an instance to take up the stage of this role."""

RUNNING: dict[Role, JobState] = {
    Role.ENCODER: JobState.ENCODER_RUNNING,
    Role.DENOISER: JobState.DENOISING_RUNNING,
    Role.DECODER: JobState.DECODER_RUNNING,
}
"""The state of a request whose stage of this role is being computed."""

FINISHED: dict[Role, JobState] = {
    Role.ENCODER: JobState.ENCODER_DONE,
    Role.DENOISER: JobState.DENOISING_DONE,
    Role.DECODER: JobState.DONE,
}
"""The state of a request whose stage of this role has just been done."""

TERMINAL: frozenset[JobState] = frozenset(
    {JobState.DONE, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED},
)
"""States that a request never leaves."""

_ABORTED = {JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED}

# Forward moves come first in each row; then the ways back: a lost output sends a request to the stage that made it,
# preemption and a lost instance send a running stage to its own queue. A stage that was repeated only for a later
# reader (the decoder may read what the encoder made) skips the stages in between whose outputs are still kept.
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    state: frozenset(following | _ABORTED)
    for state, following in {
        JobState.PENDING: {JobState.ENCODER_WAITING},
        JobState.ENCODER_WAITING: {JobState.ENCODER_RUNNING},
        JobState.ENCODER_RUNNING: {JobState.ENCODER_DONE, JobState.ENCODER_WAITING},
        JobState.ENCODER_DONE: {JobState.DENOISING_WAITING, JobState.DECODER_WAITING},
        JobState.DENOISING_WAITING: {JobState.DENOISING_RUNNING, JobState.ENCODER_WAITING},
        JobState.DENOISING_RUNNING: {
            JobState.DENOISING_DONE,
            JobState.DENOISING_WAITING,
            JobState.ENCODER_WAITING,
        },
        JobState.DENOISING_DONE: {JobState.DECODER_WAITING, JobState.ENCODER_WAITING},
        JobState.DECODER_WAITING: {
            JobState.DECODER_RUNNING,
            JobState.DENOISING_WAITING,
            JobState.ENCODER_WAITING,
        },
        JobState.DECODER_RUNNING: {
            JobState.DONE,
            JobState.DECODER_WAITING,
            JobState.DENOISING_WAITING,
            JobState.ENCODER_WAITING,
        },
    }.items()
} | {state: frozenset[JobState]() for state in TERMINAL}

_ROLE_OF: dict[JobState, Role] = {
    state: role for table in (WAITING, RUNNING, FINISHED) for role, state in table.items()
}

COUNTS_AS_WAITING: frozenset[JobState] = frozenset(WAITING.values()) | {JobState.PENDING}
"""States in which time counts against the queue timeout."""

COUNTS_AS_RUNNING: frozenset[JobState] = frozenset(RUNNING.values())
"""States in which time counts against the run timeout."""


class IllegalTransition(TriptychError):
    """A state was asked to follow one that it may not follow; nothing was changed."""

    code = "illegal_transition"

    def __init__(self, old: JobState, new: JobState) -> None:
        legal = ", ".join(sorted(TRANSITIONS[old])) or "nothing, it is terminal"
        super().__init__(f"{old} cannot become {new}; what may follow {old}: {legal}")
        self.old = old
        self.new = new


def transition(old: JobState, new: JobState) -> JobState:
    """``new`` when it may follow ``old``; raises `IllegalTransition` otherwise."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(old, new)
    return new


def role_of(state: JobState) -> Role | None:
    """The role whose stage the state speaks of; DONE speaks of the decoder, None for states of no role."""
    return _ROLE_OF.get(state)


def is_running(state: JobState) -> bool:
    """Whether time spent in this state counts against the run timeout."""
    return state in COUNTS_AS_RUNNING
