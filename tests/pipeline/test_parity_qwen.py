"""Further Qwen-Image models, split against whole: the same bytes in float32 on the CPU.

Those that start from pictures resize each to about a megapixel, so that even tiny models take seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from .parity import Case, Pair, pairs, picture
from .qwen_checkpoints import QWEN_BUILDERS

EDIT: dict[str, Any] = {"prompt": "a red cat", "negative_prompt": "bad", "num_inference_steps": 2}

CASES = {
    "qwen_distilled": Case(
        request={"prompt": "a cat", "height": 64, "width": 48, "max_sequence_length": 512}, guidance="true_cfg_scale"
    ),
    "qwen_edit": Case(request=EDIT, guidance="true_cfg_scale", encoder_keeps=("vae",)),
    "qwen_edit_plus": Case(request=EDIT, guidance="true_cfg_scale", encoder_keeps=("vae",)),
    # The blocks normalise guidance as all Qwen-Image models do; the classic pipeline of this one does so when told.
    "qwen_layered": Case(
        request=EDIT | {"layers": 2}, guidance="true_cfg_scale", encoder_keeps=("vae",), classic={"cfg_normalize": True}
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    def checkpoint(family: str) -> Path:
        if family != "qwen_distilled":
            pytest.importorskip("torchvision")
        folder = tmp_path_factory.mktemp(family) / "model"
        QWEN_BUILDERS[family](folder)
        return folder

    return pairs(CASES, checkpoint, tmp_path_factory.mktemp("pairs"))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return picture({"width": width, "height": height}, seed)


@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("negative", ["bad", None])
def test_a_distilled_model_in_few_steps_without_guidance(
    pair: Callable[[str], Pair], steps: int, negative: str | None
) -> None:
    both = pair("qwen_distilled")
    both.check(both.case.request, seed=steps, num_inference_steps=steps, guidance_scale=1.0, negative_prompt=negative)


@pytest.mark.vision
@pytest.mark.parametrize(("seed", "guidance"), [(0, 4.0), (2**40 + 7, 1.0)])
def test_one_picture_in_its_own_shape(pair: Callable[[str], Pair], seed: int, guidance: float) -> None:
    both = pair("qwen_edit")
    request = {**both.case.request, "height": 48, "width": 64, "image": noise(60, 90)}
    both.check(request, seed=seed, guidance_scale=guidance)


@pytest.mark.vision
def test_the_output_has_the_pictures_shape_where_no_size_is_given(pair: Callable[[str], Pair]) -> None:
    both = pair("qwen_edit")
    both.check({**both.case.request, "image": noise(40, 80)}, seed=3, guidance_scale=1.0, num_inference_steps=2)


@pytest.mark.vision
@pytest.mark.parametrize(("sizes", "guidance"), [([(64, 64), (90, 40)], 4.0), ([(50, 50)], 1.0)])
def test_several_pictures_each_in_its_own_shape(
    pair: Callable[[str], Pair], sizes: list[tuple[int, int]], guidance: float
) -> None:
    both = pair("qwen_edit_plus")
    images = [noise(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    both.check({**both.case.request, "height": 64, "width": 48, "image": images}, seed=5, guidance_scale=guidance)


@pytest.mark.vision
def test_every_picture_counts(pair: Callable[[str], Pair]) -> None:
    both = pair("qwen_edit_plus")
    white, black = (Image.new("RGB", (64, 64), colour) for colour in ("white", "black"))
    request = {**both.case.request, "height": 32, "width": 32, "seed": 1, "guidance_scale": 1.0}
    one, two = (both.split({**request, "image": images})[0] for images in ([white], [white, black]))
    assert not np.array_equal(one, two)


@pytest.mark.vision
@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_each_layer_is_an_output_with_transparency(pair: Callable[[str], Pair], guidance: float) -> None:
    both = pair("qwen_layered")
    request = {**both.case.request, "image": noise(64, 48).convert("RGBA"), "seed": 2, "guidance_scale": guidance}
    expected, got = both.expected(request), both.split(request)
    assert [frames.shape for frames in got] == [(1, *expected[0].shape[1:])] * 2
    assert expected[0].shape[0] == 2
    assert expected[0].shape[3] == 4
    assert np.array_equal(np.concatenate(got), expected[0])
