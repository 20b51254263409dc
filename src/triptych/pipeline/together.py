"""One step of several requests at once: each runs up to its next call of a model, and the calls are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from greenlet import getcurrent, greenlet

from triptych.accel.batching import Call, ForwardBatcher
from triptych.errors import StageError
from triptych.ids import Role
from triptych.pipeline.guard import guarded
from triptych.pipeline.randomness import GlobalRandomness
from triptych.pipeline.suspended import answered, suspendable

Outcome: TypeAlias = Any
"""What a step gives, or the exception that it raises: one run's failure is not the others'."""


class Parkable(Protocol):
    """A run that stops at calls of a model while calls are collected."""

    def advance(self) -> Any:
        """Begin a step: what it gives, or the `Call` that it came to."""
        ...

    def resume(self, call: Call) -> Any:
        """Go on with the step after ``call``, which has been computed; gives what `advance` does."""
        ...


class Once:
    """A computation without steps of its own as a `Parkable`."""

    def __init__(self, compute: Callable[[], Any], randomness: GlobalRandomness) -> None:
        """``randomness`` is in force wherever it computes, which ``compute`` does not see to by itself."""
        self._greenlet = suspendable(compute)
        self._randomness = randomness

    def advance(self) -> Any:
        """Compute up to the first call, or to the end."""
        return self._switch(lambda run: run.switch())

    def resume(self, call: Call) -> Any:
        """Compute up to the next call, or to the end."""
        return self._switch(lambda run: answered(run, call))

    def _switch(self, into: Callable[[greenlet], Any]) -> Any:
        if self._greenlet.dead:
            raise StageError("the run is over")
        self._greenlet.parent = getcurrent()
        with self._randomness.installed():
            return into(self._greenlet)


def advance_together(
    role: Role,
    runs: Sequence[Parkable],
    batcher: ForwardBatcher,
    called: Callable[[int, Call], object] = lambda number, call: None,
) -> list[Outcome]:
    """Advance every run of a ``role`` by one step; the outcomes are in the order of ``runs``. Each call that a run
    comes to is shown to ``called``, with the run's number."""
    outcomes: list[Outcome] = [None] * len(runs)
    parked: dict[int, Call] = {}

    def go(index: int, advance: Callable[[], Any]) -> None:
        outcome = _outcome(role, advance)
        if isinstance(outcome, Call):
            parked[index] = outcome
            called(index, outcome)
        else:
            outcomes[index] = outcome

    batcher.collecting = True
    try:
        for index, run in enumerate(runs):
            go(index, run.advance)
        while parked:
            computed, parked = parked, {}
            batcher.collecting = False  # what is computed now is computed
            batcher.run(list(computed.values()))
            batcher.collecting = True
            for index, call in computed.items():
                go(index, lambda run=runs[index], call=call: run.resume(call))
    finally:
        batcher.collecting = False
    return outcomes


def _outcome(role: Role, advance: Callable[[], Any]) -> Outcome:
    """Apart, so that no frame that an error was raised through holds it: it would be kept for as long."""
    try:
        with guarded(role):
            return advance()
    except Exception as error:
        return error
