"""The first state of a pipeline, from the parameters of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from triptych.pipeline.families import GENERIC
from triptych.pipeline.names import GUIDANCE_STEPS
from triptych.pipeline.request import first_state


def scales(steps: int) -> list[float]:
    kind: Any = diffusers.Ideogram4ModularPipeline
    asked = {"num_inference_steps": steps, "height": 64, "width": 64}
    return list(first_state(kind().blocks.inputs, asked, [], GENERIC)[GUIDANCE_STEPS])


def test_guidance_of_a_scale_for_each_step_takes_the_same_course_over_other_steps() -> None:
    """Symptom: Ideogram 4 failed for every number of steps but 48."""
    assert scales(48) == [7.0] * 45 + [3.0] * 3
    assert scales(96) == [7.0] * 90 + [3.0] * 6
    assert scales(16) == [7.0] * 15 + [3.0]


@pytest.mark.parametrize("steps", [1, 3, 20, 48, 200])
def test_ideogram_accepts_any_number_of_steps(steps: int) -> None:
    from diffusers.modular_pipelines.ideogram4.before_denoise import Ideogram4SetTimestepsStep
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    block: Any = Ideogram4SetTimestepsStep()
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    asked = {"num_inference_steps": steps, "height": 64, "width": 64}
    state = PipelineState(values=first_state(block.inputs, asked, [], GENERIC))
    _, state = block(SimpleNamespace(scheduler=scheduler, _execution_device=torch.device("cpu")), state)
    assert len(state.values["gw"]) == len(state.values["timesteps"]) == steps
