"""Branches of guidance as loops of Diffusers make them: what is told apart, and what is refused before it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.guiders.classifier_free_guidance import ClassifierFreeGuidance
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from triptych.accel.parallel import guidance
from triptych.accel.parallel.guidance import BranchSharing
from triptych.errors import StageError

INPUTS = {"x": (torch.ones(1, 2), -torch.ones(1, 2))}


class Model(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[Model, Any]]:
    """A model whose second branch is another rank's, and a guider."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    sharing = BranchSharing(init_device_mesh("cpu", (1,), mesh_dim_names=("cfg",)))
    model = Model()
    sharing.install(model)
    guider = sharing.share(ClassifierFreeGuidance(guidance_scale=3.0))
    guider.set_state(step=0, num_inference_steps=1, timestep=torch.tensor(1.0))
    yield model, guider
    dist.destroy_process_group()
    guidance._STEP.set(None)


def test_a_loop_may_keep_several_predictions_and_combine_each(model: tuple[Model, Any]) -> None:
    transformer, guider = model
    branches = guider.prepare_inputs(INPUTS)
    for branch in branches:
        branch.picture, branch.sound = transformer(branch.x)
    made: list[Tensor] = []
    for field in ("picture", "sound"):
        for branch in branches:
            branch.noise_pred = getattr(branch, field)
        made.append(guider(branches)[0])
    assert [float(one[0, 0]) for one in made] == [2 * (-1 + 3 * 2), 3 * (-1 + 3 * 2)]


def test_a_loop_with_two_forwards_for_a_branch_is_refused(model: tuple[Model, Any]) -> None:
    transformer, guider = model
    branch, _ = guider.prepare_inputs(INPUTS)
    transformer(branch.x)
    with pytest.raises(StageError, match=r"makes 0 branches of guidance, .* say denoiser-cfg=1"):
        transformer(branch.x)


def test_a_loop_that_keeps_its_predictions_until_the_end_is_refused(model: tuple[Model, Any]) -> None:
    transformer, guider = model
    first, second = guider.prepare_inputs(INPUTS)
    made = transformer(first.x)[0]
    second.noise_pred = made
    first.noise_pred = made
    with pytest.raises(StageError, match="makes 2 branches"):
        transformer(second.x)


def test_a_branch_that_no_forward_made_is_not_combined(model: tuple[Model, Any]) -> None:
    transformer, guider = model
    first, second = guider.prepare_inputs(INPUTS)
    first.noise_pred = transformer(first.x)[0]
    with pytest.raises(StageError, match="a branch that no forward of its own made"):
        guider([first, second])


def test_a_blank_is_not_a_number() -> None:
    outline = guidance._outline(torch.zeros(2))
    assert torch.isnan(guidance._blank(outline)).all()
