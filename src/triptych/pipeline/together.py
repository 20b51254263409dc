"""One step of several requests at once: their loops run up to each call of the model, and the calls are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from triptych.accel.batching import Call, ForwardBatcher
from triptych.ids import Role
from triptych.pipeline.guard import guarded
from triptych.pipeline.steps import SteppedBlock

Outcome: TypeAlias = Any
"""What `SteppedBlock.advance` gives, or the exception that it raises: one run's failure is not the others'."""


def advance_together(runs: Sequence[SteppedBlock], batcher: ForwardBatcher) -> list[Outcome]:
    """Advance every run by one step; the outcomes are in the order of ``runs``."""
    outcomes: list[Outcome] = [None] * len(runs)
    parked: dict[int, Call] = {}

    def go(index: int, advance: Callable[[], Any]) -> None:
        try:
            with guarded(Role.DENOISER):
                outcome = advance()
        except Exception as error:
            outcome = error
        if isinstance(outcome, Call):
            parked[index] = outcome
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
