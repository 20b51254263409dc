"""Three processes' worth of roles against the whole classic pipeline, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.config import ModelConfig
from triptych.ids import ROLES, Role
from triptych.models import EMBEDDED
from triptych.pipeline.load import load_pipeline

from .harness import Inbox, Trio, latents
from .parity import Case, Pair, assert_alike, check_bfloat16, classic, pairs

VIDEO = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", "height": 32, "width": 48, "num_frames": 9,
    "max_sequence_length": 32,
}  # fmt: skip
IMAGE = {"prompt": "a cat", "negative_prompt": "bad", "height": 64, "width": 48, "max_sequence_length": 64}

CASES = {
    "wan_t2v": Case(request=VIDEO),
    "wan22_t2v": Case(request=VIDEO),
    "wan_i2v": Case(request=VIDEO | {"max_sequence_length": 512}, image=True, encoder_keeps=("vae",)),
    # Of fewer tokens the template leaves none to the prompt.
    "qwen_t2i": Case(request=IMAGE | {"max_sequence_length": 512}, guidance="true_cfg_scale"),
    "flux": Case(request={k: v for k, v in IMAGE.items() if k != "negative_prompt"}),
    # Classic Z-Image computes both branches as one batch, which rounds differently in the last place.
    "z_image": Case(request=IMAGE, rounds=True),
}


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return pairs(CASES, checkpoint, tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(("seed", "steps", "guidance"), [(0, 4, 6.0), (2**40 + 7, 3, 1.0)])
def test_split_is_the_classic_pipeline(
    pair: Callable[[str], Pair], family: str, seed: int, steps: int, guidance: float
) -> None:
    both = pair(family)
    both.check(both.case.request, seed=seed, num_inference_steps=steps, guidance_scale=guidance)


# Wan2.1 I2V makes one at a time, split or whole: neither repeats the image's embeddings.
@pytest.mark.parametrize("family", sorted(CASES.keys() - {"wan_i2v"}))
def test_two_outputs_at_once_are_the_classic_ones(pair: Callable[[str], Pair], family: str) -> None:
    both = pair(family)
    both.check(both.case.request, seed=5, num_inference_steps=2, guidance_scale=3.0, n=2)


@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("size", [(16, 64), (48, 32)])
def test_wan_of_other_steps_and_sizes(pair: Callable[[str], Pair], steps: int, size: tuple[int, int]) -> None:
    both, (height, width) = pair("wan_t2v"), size
    both.check(
        both.case.request, seed=steps, num_inference_steps=steps, guidance_scale=2.5, height=height, width=width,
        num_frames=5,
    )  # fmt: skip


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_wan_without_negative_prompt(pair: Callable[[str], Pair], guidance: float) -> None:
    both = pair("wan_t2v")
    request = {name: value for name, value in both.case.request.items() if name != "negative_prompt"}
    both.check(request, seed=8, num_inference_steps=2, guidance_scale=guidance)


def test_one_frame_of_wan(pair: Callable[[str], Pair]) -> None:
    both = pair("wan_t2v")
    both.check(both.case.request, seed=9, num_inference_steps=2, guidance_scale=3.0, num_frames=1)


def test_what_counts_as_rounding_is_no_error_of_a_thousandth(pair: Callable[[str], Pair]) -> None:
    """Such a one, in what the decoder is given, is told from rounding."""
    both = pair("z_image")
    request = {**both.case.request, "seed": 2, "num_inference_steps": 2, "guidance_scale": 4.0}
    inbox = both.trio.encoded(request)
    both.trio.stage(Role.DENOISER, request, inbox)
    made = latents(inbox)
    (whole,) = (clip.frames for clip in both.trio.stage(Role.DECODER, request, inbox).clips)

    def noisy(share: float) -> np.ndarray[Any, Any]:
        noise = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)) * made.std() * share
        (sent,) = inbox[Role.DECODER]
        given: Inbox = {**inbox, Role.DECODER: [(sent[0], [t + noise if t is made else t for t in sent[1]])]}
        return both.trio.stage(Role.DECODER, request, given).clips[0].frames

    assert_alike(noisy(1e-7), whole, rounds=True)
    with pytest.raises(AssertionError):
        assert_alike(noisy(1e-3), whole, rounds=True)


def test_z_image_without_guidance(pair: Callable[[str], Pair]) -> None:
    both = pair("z_image")
    both.check(both.case.request, seed=2, num_inference_steps=3, guidance_scale=0.0)


def test_wan22_guides_its_second_transformer_by_its_own_scale(pair: Callable[[str], Pair]) -> None:
    both = pair("wan22_t2v")
    asked = {"seed": 4, "num_inference_steps": 5, "guidance_scale": 6.0}
    both.check(both.case.request, **asked, guidance_scale_2=2.0)
    plain, other = (both.split({**both.case.request, **asked, **more})[0] for more in ({}, {"guidance_scale_2": 2.0}))
    assert not np.array_equal(plain, other)


@pytest.mark.parametrize(("seed", "guidance"), [(0, 6.0), (1, 1.0)])
def test_wan_in_bfloat16_is_the_classic_one_with_its_exact_timestep(
    bfloat16: Pair, monkeypatch: pytest.MonkeyPatch, seed: int, guidance: float
) -> None:
    """Diffusers' modular loop rounds timestep 999 to 1000 in bfloat16; the classic pipeline does not, nor do we."""
    check_bfloat16(bfloat16, monkeypatch, seed, guidance)


@pytest.fixture(scope="module", params=["wan_t2v", "wan22_t2v", "wan_i2v"])
def bfloat16(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    folder = checkpoint(request.param)
    keeps = CASES[request.param].encoder_keeps
    trio = Trio(folder, tmp_path_factory.mktemp("bfloat16"), dtype="bfloat16", encoder_keeps=keeps)
    return Pair(CASES[request.param], trio, classic(folder, torch.bfloat16))


def test_the_embedded_model_split_is_the_classic_pipeline() -> None:
    from diffusers import DiffusionPipeline

    folder = EMBEDDED["tiny"]
    trio = Trio.of({role: load_pipeline(ModelConfig(path="tiny", device="cpu"), (role,), "cpu") for role in ROLES})
    both = Pair(Case(request={}), trio, classic(folder))
    assert isinstance(both.whole, DiffusionPipeline)
    request = {"prompt": "a red ball", "height": 64, "width": 48, "num_frames": 5, "max_sequence_length": 64}
    both.check(request, seed=3, num_inference_steps=3, guidance_scale=3.0)


def test_only_latents_go_from_wans_denoiser_to_its_decoder(pair: Callable[[str], Pair]) -> None:
    both = pair("wan_t2v")
    request = {**both.case.request, "num_inference_steps": 2}
    inbox = both.trio.encoded(request)
    assert inbox[Role.DECODER] == []
    both.trio.stage(Role.DENOISER, request, inbox)
    assert [tensor.shape for tensor in inbox[Role.DECODER][0][1]] == [(1, 16, 3, 4, 6)]


def test_no_seed_draws_another_one_each_time(pair: Callable[[str], Pair]) -> None:
    both = pair("wan_t2v")
    request = {**both.case.request, "num_inference_steps": 1}
    assert not np.array_equal(both.split(request)[0], both.split(request)[0])
