"""UniPC without waiting for the GPU: the scheduler of Wan, a request's own, with its arithmetic as it is.

Diffusers keeps the sigmas on the host and brings some of them to the GPU in each step, one by one. Each of these copies
waits until the GPU has done all that it was given, and so does the check whether a system of two equations was solved:
the host launches the next step late. Here all sigmas are brought over once, when the schedule is made, and nobody
checks. Where the sigmas stand on the host as plain numbers in a product, they still do: a number on the GPU would be
rounded before the product rather than after it.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor
from torch.overrides import TorchFunctionMode


def unhurried(scheduler: Any) -> Any:
    """``scheduler``, one request's own; if it is a UniPC scheduler, one that does not wait. Before `set_timesteps`."""
    if type(scheduler) is UniPCMultistepScheduler:
        scheduler.__class__ = _UniPC
    return scheduler


class _Unchecked(TorchFunctionMode):
    """Solves without asking afterwards whether there was a solution."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **(kwargs or {})).result
        return func(*args, **(kwargs or {}))


class _UniPC(UniPCMultistepScheduler):
    """`UniPCMultistepScheduler` whose sigmas are on the latents' device while a sample is updated."""

    _near: tuple[Tensor, Tensor] | None = None
    """The sigmas on the host, and the same on the device of the timesteps."""

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: list[float] | None = None,
        mu: bool | None = None,
    ) -> None:
        super().set_timesteps(num_inference_steps, device, sigmas, mu)
        self._near = self.sigmas, self.sigmas.to(self.timesteps.device)

    def multistep_uni_p_bh_update(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._brought(), _Unchecked():
            return super().multistep_uni_p_bh_update(*args, **kwargs)

    def multistep_uni_c_bh_update(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._brought(), _Unchecked():
            return super().multistep_uni_c_bh_update(*args, **kwargs)

    @contextmanager
    def _brought(self) -> Generator[None]:
        there = self._near
        if there is None or self.sigmas is not there[0]:  # somebody gave it others
            yield
            return
        self.sigmas = there[1]
        try:
            yield
        finally:
            self.sigmas = there[0]


# A checkpoint knows the objects of Diffusers by their module, and messages name them.
_UniPC.__name__ = _UniPC.__qualname__ = UniPCMultistepScheduler.__name__
_UniPC.__module__ = UniPCMultistepScheduler.__module__
