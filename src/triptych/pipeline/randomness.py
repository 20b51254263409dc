"""Random states of one run: its own generator and its own copy of torch's global ones.

Some pipelines seed or draw from the global generators. Each run has its own states of them, put in place while it
computes, so that interleaved runs draw what they would draw alone, and a replay draws what was drawn when recording.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

_APART = 0x9E3779B97F4A7C15
"""Keeps the global generators from drawing the same numbers as the request's own."""

States = list[torch.Tensor | None]


class Randomness:
    """The random sources of one run, all begun from ``seed``. The request's ``generator`` lives on the CPU."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self._device = device if device.type == "cuda" else None
        self._own: list[torch.Tensor] = [
            torch.Generator(where).manual_seed((seed + _APART) % 2**63).get_state()
            for where in (torch.device("cpu"), self._device)
            if where is not None
        ]

    @contextmanager
    def installed(self) -> Generator[None]:
        """The global states are this run's inside, and what they were afterwards."""
        outside = self._global()
        self._install(self._own)
        try:
            yield
        finally:
            self._own = self._global()
            self._install(outside)

    def states(self) -> list[torch.Tensor]:
        """All states, the generator's first. To be asked while `installed`."""
        return [self.generator.get_state(), *self._global()]

    def changed(self, before: list[torch.Tensor]) -> States:
        """The present states, None where equal to ``before``."""
        return [None if torch.equal(old, new) else new for old, new in zip(before, self.states(), strict=True)]

    def advance(self, states: States) -> None:
        """Take over what `changed` said."""
        mine, *own = states
        if mine is not None:
            self.generator.set_state(mine.cpu())
        self._install([old if new is None else new.cpu() for old, new in zip(self._global(), own, strict=True)])

    def _global(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return states if self._device is None else [*states, torch.cuda.get_rng_state(self._device)]

    def _install(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(states[1], self._device)
