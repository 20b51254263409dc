"""What has happened in simulations: which faults struck and which states followed which. Sums over many seeds."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from triptych.core.events import JobState
from triptych.core.states import TERMINAL, TRANSITIONS


class Fault(enum.StrEnum):
    """What can go wrong, and what clients and operators may do at any time."""

    MESSAGE_LOST = "message lost"
    MESSAGE_DELAYED = "message delayed"
    MESSAGE_DUPLICATED = "message duplicated"
    MESSAGES_REORDERED = "messages reordered"
    PARTITION = "partition"
    CRASH = "instance crashed"
    BREAKDOWN = "instance broke from within"
    RESTART = "instance restarted"
    DEPARTURE = "instance asked to leave"
    FREEZE = "instance frozen"
    REFUSED = "work port refused"
    SERVER_CRASH = "server crashed"
    SERVER_RESTART = "server restarted"
    CLOCK_JUMP = "clock jumped"
    POOL_FULL = "pool full"
    PULL_FAILED = "pull failed"
    STAGE_FAILED = "stage failed"
    STAGE_HOPELESS = "stage failed for good"
    STORE_FAILED = "store failed"
    UNJOURNALLED = "journal entry lost"
    END_LOST = "end not journalled, so that the request ran again"
    KILLED_STORING = "server crashed between storing files and saying so"
    KILLED_DELETING = "server crashed between a deletion and its end"
    KILLED_PAUSED = "server restarted with a paused request"
    CANCEL = "cancelled"
    DELETE = "deleted"
    PAUSE = "paused"
    MIGRATE = "moved"


_PASSING = (JobState.PENDING, JobState.ENCODER_DONE, JobState.DENOISING_DONE)
"""States that are entered and left within one event, so that nothing can end a request there."""

UNREACHABLE: frozenset[tuple[JobState, JobState]] = frozenset(
    {(state, end) for state in _PASSING for end in TERMINAL}
    # What the encoder made for the denoiser is given back once that is done: there is nothing to denoise from again.
    | {(JobState.DECODER_RUNNING, JobState.DENOISING_WAITING)}
)
"""Legal moves that no sequence of events leads to."""


@dataclass(kw_only=True, slots=True)
class Coverage:
    """Counts over one or many simulations."""

    faults: Counter[Fault] = field(default_factory=Counter[Fault])
    transitions: Counter[tuple[JobState, JobState]] = field(default_factory=Counter[tuple[JobState, JobState]])
    ends: Counter[JobState] = field(default_factory=Counter[JobState])
    counted: Counter[str] = field(default_factory=Counter[str])
    """The router's own counters."""

    def add(self, other: Coverage) -> None:
        """Take in what another one has seen."""
        self.faults.update(other.faults)
        self.transitions.update(other.transitions)
        self.ends.update(other.ends)
        self.counted.update(other.counted)

    def missing(self) -> list[str]:
        """Faults that never struck, and legal transitions that never happened although they can."""
        never = [str(fault) for fault in Fault if not self.faults[fault]]
        legal = ((old, new) for old, following in TRANSITIONS.items() for new in sorted(following))
        return never + [
            f"{old} -> {new}" for old, new in legal if not ((old, new) in UNREACHABLE or self.transitions[old, new])
        ]
