"""Wan's further models, split against whole. All are bit-identical in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.errors import BadRequest

from .harness import Trio
from .parity import Case, Film, Pair, check_bfloat16, classic, pairs, picture
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
    "wan_flf2v": Case(request=VIDEO | {"max_sequence_length": 512}, image=True, encoder_keeps=("vae",)),
    "wan_vace": Case(request=VIDEO, encoder_keeps=("vae",)),
    "wan22_vace": Case(request=VIDEO, encoder_keeps=("vae",)),
    "wan_v2v": Case(request={k: v for k, v in VIDEO.items() if k != "num_frames"}, encoder_keeps=("vae",)),
}
ALONE = ("wan22_i2v", "wan22_ti2v", "wan22_ti2v_i2v", "wan_distilled", "wan22_distilled", "wan_vace", "wan22_vace")
"""Those that need nothing besides a prompt and a picture to start from."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> the folder of its checkpoint, built once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model"
            WAN_BUILDERS[family](made[family])
        return made[family]

    return get


@pytest.fixture(scope="module")
def pair(make: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return pairs(CASES, make, tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("family", ALONE)
@pytest.mark.parametrize(("seed", "guidance"), [(0, 6.0), (2**40 + 7, 1.0)])
def test_split_is_the_classic_pipeline(pair: Callable[[str], Pair], family: str, seed: int, guidance: float) -> None:
    both = pair(family)
    both.check(both.case.request, seed=seed, guidance_scale=guidance)


@pytest.mark.parametrize(("family", "guidance"), [("wan22_i2v", 6.0), ("wan_flf2v", 1.0)])
def test_image_to_video_in_bfloat16_is_the_classic_one_with_its_exact_timestep(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Path], tmp_path: Path, family: str, guidance: float
) -> None:
    """As text-to-video is."""
    case, folder = CASES[family], make(family)
    request = dict(case.request)
    trio = Trio(folder, tmp_path, dtype="bfloat16", encoder_keeps=case.encoder_keeps)
    if family == "wan_flf2v":
        request["last_image"] = picture(request, seed=1)
    both = Pair(replace(case, request=request), trio, classic(folder, torch.bfloat16))
    check_bfloat16(both, monkeypatch, 5, guidance)


@pytest.mark.parametrize("family", ["wan22_ti2v", "wan22_ti2v_i2v", "wan_vace"])
def test_a_replayed_model_in_bfloat16_is_the_classic_one(
    make: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """Its own loop runs, so that timestep and rounding are its own, to the last bit."""
    case, folder = CASES[family], make(family)
    trio = Trio(folder, tmp_path, dtype="bfloat16", encoder_keeps=case.encoder_keeps)
    request = {**case.request, "num_inference_steps": 3, "seed": 5, "guidance_scale": 6.0}
    if family == "wan_vace":
        request["video"] = Film.of(request)
    Pair(case, trio, classic(folder, torch.bfloat16)).check(request)


@pytest.mark.parametrize("family", ["wan_flf2v", "wan22_i2v"])
@pytest.mark.parametrize(("size", "guidance"), [((32, 48), 5.0), ((48, 32), 1.0)])
def test_a_first_and_a_last_picture(
    pair: Callable[[str], Pair], family: str, size: tuple[int, int], guidance: float
) -> None:
    both = pair(family)
    request = {**both.case.request, "height": size[0], "width": size[1]}
    both.check({**request, "last_image": picture(request, seed=1)}, seed=3, guidance_scale=guidance)


def test_a_model_for_two_pictures_says_that_it_needs_the_last(pair: Callable[[str], Pair]) -> None:
    both = pair("wan_flf2v")
    with pytest.raises(BadRequest, match="last_image is required"):
        both.split({**both.case.request, "guidance_scale": 1.0})


@pytest.mark.parametrize("family", ["wan_vace", "wan22_vace"])
@pytest.mark.parametrize("given", ["video", "video mask", "references", "video mask references"])
def test_vace_is_steered_by_clip_mask_and_references(pair: Callable[[str], Pair], family: str, given: str) -> None:
    both = pair(family)
    request = {**both.case.request, "conditioning_scale": 0.7}
    if "video" in given:
        request["video"] = Film.of(request)
    if "mask" in given:
        request["mask"] = Film.of(request, seed=50)
    if "references" in given:
        request["reference_images"] = [picture(request, 8), picture(request, 9)]
    both.check(request, seed=4, guidance_scale=5.0, num_inference_steps=2)


def test_a_still_picture_holds_for_all_frames_of_a_mask(pair: Callable[[str], Pair]) -> None:
    both = pair("wan_vace")
    request = {**both.case.request, "video": Film.of(both.case.request), "num_inference_steps": 2, "seed": 1}
    still = picture(request, 5)
    expected = both.expected({**request, "mask": [still] * request["num_frames"], "guidance_scale": 2.0})
    assert np.array_equal(both.split({**request, "mask": still, "guidance_scale": 2.0}), expected)


def test_a_mask_without_a_clip_and_a_clip_too_short_are_refused(pair: Callable[[str], Pair]) -> None:
    both = pair("wan_vace")
    short = Film.of({**both.case.request, "num_frames": 5})
    with pytest.raises(BadRequest, match="mask: is of no use without video"):
        both.split({**both.case.request, "mask": Image.new("RGB", (8, 8))})
    with pytest.raises(BadRequest, match="video: the clip has 5 frames, num_frames=9 are asked for"):
        both.split({**both.case.request, "video": short})


@pytest.mark.parametrize(("strength", "guidance"), [(0.8, 5.0), (0.5, 1.0)])
def test_a_clip_from_a_clip(pair: Callable[[str], Pair], strength: float, guidance: float) -> None:
    both = pair("wan_v2v")
    clip = Film.of({**both.case.request, "num_frames": 9})
    both.check({**both.case.request, "video": clip, "strength": strength}, seed=6, guidance_scale=guidance)


def test_the_second_transformer_of_a_replayed_model_has_its_own_scale(pair: Callable[[str], Pair]) -> None:
    both = pair("wan22_vace")
    both.check(both.case.request, seed=4, guidance_scale=6.0, guidance_scale_2=2.0)


@pytest.mark.parametrize("family", ["wan22_distilled", "wan22_i2v", "wan_vace"])
def test_flow_shift_is_the_schedulers(pair: Callable[[str], Pair], family: str) -> None:
    """As if the scheduler had been configured with that shift."""
    both = pair(family)
    stock = both.whole.scheduler
    setting = "flow_shift" if "flow_shift" in stock.config else "shift"
    both.whole.scheduler = type(stock).from_config(stock.config, **{setting: 7.0})
    try:
        expected = both.expected({**both.case.request, "seed": 2, "guidance_scale": 3.0})
    finally:
        both.whole.scheduler = stock
    asked = {**both.case.request, "seed": 2, "guidance_scale": 3.0}
    assert np.array_equal(both.split({**asked, "flow_shift": 7.0}), expected)
    assert not np.array_equal(both.split(asked), expected)
