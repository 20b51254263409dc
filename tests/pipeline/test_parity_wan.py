"""Wan's further models, split against whole. All are bit-identical in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .parity import Case, Pair, pairs
from .wan_checkpoints import WAN_BUILDERS

VIDEO = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", "height": 32, "width": 48, "num_frames": 9,
    "max_sequence_length": 32, "num_inference_steps": 4,
}  # fmt: skip

CASES = {
    "wan22_i2v": Case(request=VIDEO | {"max_sequence_length": 512}, image=True, encoder_keeps=("vae",)),
    "wan22_ti2v": Case(request=VIDEO | {"width": 64}),
    "wan22_ti2v_i2v": Case(request=VIDEO | {"width": 64}, image=True, encoder_keeps=("vae",)),
    "wan_distilled": Case(request=VIDEO),
    "wan22_distilled": Case(request=VIDEO),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    def checkpoint(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "model"
        WAN_BUILDERS[family](folder)
        return folder

    return pairs(CASES, checkpoint, tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(("seed", "guidance"), [(0, 6.0), (2**40 + 7, 1.0)])
def test_split_is_the_classic_pipeline(pair: Callable[[str], Pair], family: str, seed: int, guidance: float) -> None:
    both = pair(family)
    both.check(both.case.request, seed=seed, guidance_scale=guidance)
