"""Every family's loop may be prepared beside another request's steps, and makes the same bytes as alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.config import ModelConfig
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline, quiet_libraries
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import Preparable, StageRun
from triptych.worker.beside import Made

from .cases import BUILD, CASES
from .classic_harness import REQUESTS, TOLERATED
from .harness import Inbox, finish, post
from .test_checkpoint_families import tensors

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

MODULAR = [name for name in CASES if name not in {*REQUESTS, "wan_vace", "wan22_ti2v"}]
"""Those by record and replay have nothing to prepare: they begin in their turn."""

OFTEN = ("wan22_t2v",)
"""Its guiders change the model that both requests share."""


def check(family: str, folder: Path) -> None:
    quiet_libraries()
    BUILD[family](folder)
    pipeline = load_pipeline(ModelConfig(path=str(folder), device="cpu"), ROLES, "cpu")
    assert isinstance(pipeline, ModularRolePipeline)
    assert pipeline.prepares
    asked, files = CASES[family].asked()
    requests: list[dict[str, Any]] = [{**asked, "seed": seed} for seed in (1, 2)]
    inboxes: list[Inbox] = []
    for params in requests:
        inboxes.append({role: [] for role in ROLES})
        post(finish(pipeline.start(Role.ENCODER, params, [], files)), inboxes[-1])

    def start(which: int) -> StageRun:
        return pipeline.start(Role.DENOISER, requests[which], inboxes[which][Role.DENOISER], [])

    alone = [tensors(finish(start(which))) for which in (0, 1)]
    first = start(0)
    assert first.advance() is None, "needs two steps"
    with Made("cpu"):  # as on a GPU
        second = start(1)
        assert isinstance(second, Preparable)
        second.prepare()
    together = [tensors(finish(run)) for run in (first, second)]
    for expected, got in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("family", OFTEN)
def test_a_loop_prepared_beside_anothers_steps_makes_the_same_bytes(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in MODULAR if name not in OFTEN])
def test_all_families_do(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")
