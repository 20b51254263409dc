"""A prompt that was seen before is computed in no family, and what the encoder hands on has the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.ids import Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import StageResult

from .cases import CASES
from .classic_harness import TOLERATED
from .harness import finish

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

MODULAR = (
    "wan_t2v", "qwen_t2i", "z_image", "flux", "flux2", "flux2_klein", "sd3", "ltx", "ltx2", "helios", "hunyuan_video15",
)  # fmt: skip
CLASSIC = ("hunyuan_image", "hunyuan_video", "sana", "sdxl", "glm_image", "mochi", "cogvideox_t2v")


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


@pytest.fixture
def folder(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    classic_checkpoint: Callable[[str], Path],
) -> Path:
    family = request.node.callspec.params["family"]
    return (classic_checkpoint if family in CLASSIC else checkpoint)(family)


@pytest.mark.parametrize("family", MODULAR + CLASSIC)
def test_a_prompt_seen_before_is_not_computed(folder: Path, family: str) -> None:
    request, files = CASES[family].asked()

    def encoded(pipeline: Any) -> StageResult:
        return finish(pipeline.start(Role.ENCODER, request, [], files))

    tally = Tally()
    stock = load_pipeline(ModelConfig(path=str(folder), device="cpu", prompt_cache_bytes=0), (Role.ENCODER,), "cpu")
    cached = load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.ENCODER,), "cpu", tally)
    expected = encoded(stock)
    assert same(encoded(cached), expected)
    computed = tally.prompt_misses
    assert computed > 0
    assert same(encoded(cached), expected)
    assert (tally.prompt_hits, tally.prompt_misses) == (computed, computed)


def same(one: StageResult, other: StageResult) -> bool:
    return [(out.consumer, out.tree) for out in one.outputs] == [
        (out.consumer, out.tree) for out in other.outputs
    ] and all(
        torch.equal(mine, its)
        for mine_of, its_of in zip(one.outputs, other.outputs, strict=True)
        for mine, its in zip(mine_of.tensors, its_of.tensors, strict=True)
    )
