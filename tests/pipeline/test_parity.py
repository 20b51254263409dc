"""Three processes' worth of roles against the whole classic pipeline, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.ids import ROLES, Role
from triptych.models import EMBEDDED

from .harness import Trio, frames_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a family is asked, by its classic pipeline's names where they differ."""

    request: Mapping[str, Any]
    guidance: str = "guidance_scale"
    """The classic pipeline's argument."""
    image: bool = False
    encoder_keeps: tuple[str, ...] = ()
    """Weights that the encoder needs besides text and image encoders."""
    tolerance: int = 0
    """Levels by which frames may differ; 0 is bit-identical."""
    options: Mapping[str, Any] = field(default_factory=dict)


VIDEO = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", "height": 32, "width": 48, "num_frames": 9,
    "max_sequence_length": 32,
}  # fmt: skip
IMAGE = {"prompt": "a cat", "negative_prompt": "bad", "height": 64, "width": 48, "max_sequence_length": 64}

CASES = {
    "wan_t2v": Case(request=VIDEO),
    "wan22_t2v": Case(request=VIDEO),
    "wan_i2v": Case(request=VIDEO | {"max_sequence_length": 512}, image=True, encoder_keeps=("vae",)),
    "qwen_t2i": Case(request=IMAGE, guidance="true_cfg_scale"),
    "flux": Case(request={k: v for k, v in IMAGE.items() if k != "negative_prompt"}),
    # Classic Z-Image computes both branches as one batch, which rounds differently in the last place.
    "z_image": Case(request=IMAGE, tolerance=1),
}


@dataclass(frozen=True)
class Pair:
    """A family split and whole."""

    case: Case
    trio: Trio
    whole: Any

    def expected(self, request: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
        arguments = dict(request)
        generator = torch.Generator("cpu").manual_seed(arguments.pop("seed"))
        arguments[self.case.guidance] = arguments.pop("guidance_scale")
        if "n" in arguments:
            name = "num_videos_per_prompt" if "num_frames" in arguments else "num_images_per_prompt"
            arguments[name] = arguments.pop("n")
        if self.case.image:
            arguments["image"] = picture(arguments)
        output = self.whole(**arguments, generator=generator, output_type="pil")
        return [frames_of(clip) for clip in output.frames] if "frames" in output else [
            frames_of([image]) for image in output.images
        ]  # fmt: skip

    def split(self, request: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
        if not self.case.image:
            return [clip.frames for clip in self.trio.generate(request)]
        file = io.BytesIO()
        picture(request).save(file, "PNG")
        return [clip.frames for clip in self.trio.generate({**request, "image": {"blob": 0}}, [file.getvalue()])]

    def check(self, request: Mapping[str, Any]) -> None:
        expected, got = self.expected(request), self.split(request)
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.shape == theirs.shape
            assert ours.std() > 0, "a flat picture proves nothing"
            assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= self.case.tolerance


def picture(request: Mapping[str, Any]) -> Image.Image:
    return Image.effect_noise((request["width"], request["height"]), 80).convert("RGB").rotate(90) if False else (
        Image.fromarray(
            np.random.default_rng(0).integers(0, 255, (request["height"], request["width"], 3), dtype=np.uint8)
        )
    )  # fmt: skip


def classic(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(folder), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            case, folder = CASES[family], checkpoint(family)
            trio = Trio(folder, tmp_path_factory.mktemp(family), encoder_keeps=case.encoder_keeps)
            made[family] = Pair(case, trio, classic(folder))
        return made[family]

    return get


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(("seed", "steps", "guidance"), [(0, 4, 6.0), (2**40 + 7, 3, 1.0)])
def test_split_is_the_classic_pipeline(
    pair: Callable[[str], Pair], family: str, seed: int, steps: int, guidance: float
) -> None:
    both = pair(family)
    both.check({**both.case.request, "seed": seed, "num_inference_steps": steps, "guidance_scale": guidance})
