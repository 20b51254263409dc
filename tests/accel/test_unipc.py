"""UniPC that does not wait: the stock scheduler's bytes, and nothing brought to the device or looked at in a step."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triptych.accel.unipc import unhurried

WAN: dict[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
BACKWARD: dict[str, Any] = {"predict_x0": False, "prediction_type": "epsilon"}
KINDS: list[dict[str, Any]] = [WAN, WAN | {"solver_order": 3, "solver_type": "bh1"}, WAN | BACKWARD]


def run(scheduler: Any, dtype: torch.dtype, device: str = "cpu", steps: int = 6) -> list[Tensor]:
    """The samples after each of ``steps``, of a model whose answers are numbers drawn from a seed."""
    scheduler.set_timesteps(steps, device=device)
    scheduler.set_begin_index(0)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, 2, 4, 4, generator=generator).to(device)
    samples: list[Tensor] = []
    for t in scheduler.timesteps:
        output = torch.randn(sample.shape, generator=generator).to(device, dtype)
        sample = scheduler.step(output, t, sample, return_dict=False)[0]
        samples.append(sample)
    return samples


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_samples_are_the_stock_scheduler_s(settings: dict[str, Any], dtype: torch.dtype) -> None:
    stock = run(UniPCMultistepScheduler(**settings), dtype)
    ours = run(unhurried(UniPCMultistepScheduler(**settings)), dtype)
    assert stock[-2].isfinite().all()
    torch.testing.assert_close(ours, stock, rtol=0, atol=0, equal_nan=True)  # some end in a logarithm of zero


class Waits(TorchDispatchMode):
    """Counts copies between devices, and checks of a solution, each of which waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        moved = name == "_to_copy" and result.device != args[0].device
        self.count += moved or name == "_linalg_check_errors"
        return result


def waits_in_steps(scheduler: Any) -> int:
    """On a device that has no numbers; the schedule is made before."""
    device, steps = "meta", 6
    scheduler.set_timesteps(steps, device=device)
    scheduler.set_begin_index(0)
    sample = torch.randn(1, 4, 2, 4, 4, device=device)
    with Waits() as waits:
        for t in scheduler.timesteps:
            sample = scheduler.step(torch.randn_like(sample), t, sample, return_dict=False)[0]
    return waits.count


@pytest.mark.parametrize("settings", KINDS)
def test_nothing_in_a_step_waits_for_the_device(settings: dict[str, Any]) -> None:
    assert waits_in_steps(UniPCMultistepScheduler(**settings)) > 20
    assert waits_in_steps(unhurried(UniPCMultistepScheduler(**settings))) == 0


def test_sigmas_that_somebody_exchanged_are_the_ones_that_count() -> None:
    stock, ours = UniPCMultistepScheduler(**WAN), unhurried(UniPCMultistepScheduler(**WAN))
    samples: list[Tensor] = []
    for scheduler in (stock, ours):
        scheduler.set_timesteps(4)
        scheduler.sigmas = scheduler.sigmas * 0.9
        sample = torch.ones(1, 4, 4)
        for t in scheduler.timesteps:
            sample = scheduler.step(sample * 0.5, t, sample, return_dict=False)[0]
        samples.append(sample)
    assert torch.equal(*samples)


def test_pipelines_see_the_stock_scheduler() -> None:
    ours = unhurried(UniPCMultistepScheduler(**WAN))
    assert isinstance(ours, UniPCMultistepScheduler)
    assert "sigmas" in inspect.signature(ours.set_timesteps).parameters
    assert type(ours).__name__ == "UniPCMultistepScheduler"
