"""The flow shift of a request reaches the scheduler that it is for, and no other request's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from triptych.config import ModelConfig
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import request_view
from triptych.pipeline.shift import shift_of, shifted

UNIPC = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (UniPCMultistepScheduler(**UNIPC), UniPCMultistepScheduler(**UNIPC | {"flow_shift": 5.0})),
        (FlowMatchEulerDiscreteScheduler(shift=3.0), FlowMatchEulerDiscreteScheduler(shift=5.0)),
    ],
)
def test_a_shifted_scheduler_is_one_that_was_made_so(own: Any, wanted: Any) -> None:
    found = shifted(own, {"flow_shift": 5.0})
    for scheduler in (found, wanted):
        scheduler.set_timesteps(6)
    assert torch.equal(found.sigmas, wanted.sigmas)
    assert shift_of(own).value == 3.0
    assert shifted(own, {"flow_shift": 3.0}) is own
    assert shifted(own, {}) is own


@pytest.mark.parametrize(
    "scheduler",
    [FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), UniPCMultistepScheduler(), None],
)
def test_a_scheduler_that_has_no_shift_of_its_own_offers_none(scheduler: Any) -> None:
    assert shift_of(scheduler) is None


def test_the_shift_of_one_request_is_not_the_next_one_s() -> None:
    pipeline = load_pipeline(ModelConfig(path="tiny", device="cpu"), ROLES, "cpu")
    stock = pipeline.component(Role.DENOISER, "scheduler").config.flow_shift
    view = request_view(pipeline.pipeline(Role.DENOISER), pipeline._family, {"flow_shift": stock + 1}, encoder=False)
    assert view.scheduler.config.flow_shift == stock + 1
    assert pipeline.component(Role.DENOISER, "scheduler").config.flow_shift == stock
