"""Random states of one run: its own generator and its own copy of torch's global ones.

Some pipelines seed or draw from the global generators, and so do schedulers that add noise in a step and are given no
generator. Each run has its own states of them, put in place while it computes, so that interleaved runs draw what they
would draw alone, and a replay draws what was drawn when recording.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

APART = 0x9E3779B97F4A7C15
"""Keeps the global generators from drawing the same numbers as the request's own."""

States = list[torch.Tensor | None]


class GlobalRandomness:
    """The states of the global generators, CPU's and device's, for one run: begun from ``seed``, apart from its own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._inside = False
        self._own: list[torch.Tensor] = [
            torch.Generator(where).manual_seed((seed + APART) % 2**63).get_state()
            for where in (torch.device("cpu"), self._device)
            if where is not None
        ]

    @contextmanager
    def installed(self) -> Generator[None]:
        """The global states are this run's inside, and what they were afterwards."""
        outside = self._global()
        self._install(self._own)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._own = self._global()
            self._install(outside)

    def states(self) -> list[torch.Tensor]:
        """All states as they are now, inside and outside."""
        return self._global() if self._inside else list(self._own)

    def changed(self, before: Sequence[torch.Tensor]) -> States:
        """The present states, None where equal to ``before``."""
        return [None if torch.equal(old, new) else new for old, new in zip(before, self.states(), strict=True)]

    def advance(self, states: Sequence[torch.Tensor | None]) -> None:
        """Take over what `changed` said. To be called while `installed`."""
        self._install([old if new is None else new.cpu() for old, new in zip(self._global(), states, strict=True)])

    def _global(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return states if self._device is None else [*states, torch.cuda.get_rng_state(self._device)]

    def _install(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(states[1], self._device)


class Randomness(GlobalRandomness):
    """All random sources of one run, begun from ``seed``. The request's ``generator`` lives on the CPU."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def states(self) -> list[torch.Tensor]:
        """All states as they are now, the generator's first."""
        return [self.generator.get_state(), *super().states()]

    def advance(self, states: Sequence[torch.Tensor | None]) -> None:
        """Take over what `changed` said. To be called while `installed`."""
        mine, *own = states
        if mine is not None:
            self.generator.set_state(mine.cpu())
        super().advance(own)
