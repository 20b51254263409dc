"""Which families of models have checkpoints: from each of them another loading goes on to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from triptych.config import ModelConfig
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline, quiet_libraries
from triptych.pipeline.stage import Resumable, StageResult

from .cases import BUILD, CASES
from .classic_harness import REQUESTS, TOLERATED
from .harness import Inbox, finish, post

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

WITHOUT = {*REQUESTS, "wan_vace", "wan22_ti2v", "helios"}
"""Those by record and replay, and the one whose loop goes over chunks: their stage starts again."""

OFTEN = ("wan22_t2v",)
"""Its steps put another transformer and another guider in place."""


def tensors(result: StageResult) -> list[torch.Tensor]:
    return [tensor for output in result.outputs for tensor in output.tensors]


def check(family: str, folder: Path) -> None:
    """Each step but the last is followed by a checkpoint, unless the family has none."""
    quiet_libraries()
    BUILD[family](folder)
    here, there = (load_pipeline(ModelConfig(path=str(folder), device="cpu"), ROLES, "cpu") for _ in range(2))
    asked, files = CASES[family].asked()
    params = {**asked, "num_inference_steps": max(4, asked["num_inference_steps"])}
    inbox: Inbox = {role: [] for role in ROLES}
    post(finish(here.start(Role.ENCODER, params, [], files)), inbox)
    run = here.start(Role.DENOISER, params, inbox[Role.DENOISER], [])
    made = []
    while (result := run.advance()) is None:
        made.append(run.checkpoint() if isinstance(run, Resumable) else None)
    if family in WITHOUT:
        assert not any(made)
        return
    assert len(made) >= 3
    for frozen in made:
        assert frozen is not None
        again = there.start(Role.DENOISER, params, inbox[Role.DENOISER], [])
        assert isinstance(again, Resumable)
        again.restore(frozen[0], [tensor.clone() for tensor in frozen[1]])
        for expected, got in zip(tensors(result), tensors(finish(again)), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("family", OFTEN)
def test_a_family_goes_on_from_each_of_its_checkpoints(family: str, tmp_path: Path) -> None:
    """Symptom: Wan 2.2 had no checkpoints at all, so a pause or a killed denoiser cost it every step."""
    check(family, tmp_path / "model")


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in CASES if name not in OFTEN])
def test_all_families_do(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")
