"""Frames from what decoders leave, rounded as stock Diffusers rounds for PIL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from triptych.errors import StageError
from triptych.pipeline.decode import to_clips

LEVELS = torch.linspace(0, 1, 2 * 3 * 3 * 16 * 4).reshape(2, 3, 3, 16, 4)
"""Two clips of three frames, 16 high and 4 wide: many values that lie between two levels."""


def stock(frames: torch.Tensor) -> np.ndarray[Any, Any]:
    """[frames, 3, height, width] in 0..1 as Diffusers makes PIL images of it."""
    images = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(frames))
    return np.stack([np.asarray(image) for image in images])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_videos_round_as_diffusers_does(dtype: torch.dtype) -> None:
    video = LEVELS.to(dtype)
    clips = to_clips({"videos": video}, fps=8.0)
    assert len(clips) == 2
    for clip, frames in zip(clips, video, strict=True):
        assert np.array_equal(clip.frames, stock(frames))
        assert (clip.fps, clip.frames.dtype, clip.audio) == (8.0, np.uint8, None)


def test_halves_go_to_the_even_level() -> None:
    image = torch.tensor([0.5, 1.5, 2.5]).reshape(1, 3, 1, 1) / 255
    assert to_clips({"images": image}, fps=0.0)[0].frames.flatten().tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    "batch",
    [
        LEVELS[0],
        LEVELS[0].permute(0, 2, 3, 1).numpy(),
        [Image.fromarray(frame) for frame in stock(LEVELS[0])],
        list(LEVELS[0]),
    ],
    ids=["tensor", "array", "images", "list of tensors"],
)
def test_images_become_clips_of_one_frame(batch: Any) -> None:
    clips = to_clips({"images": batch}, fps=0.0)
    assert [clip.frames.shape for clip in clips] == [(1, 16, 4, 3)] * 3
    assert np.array_equal(np.concatenate([clip.frames for clip in clips]), stock(LEVELS[0]))


def test_lists_of_images_become_clips() -> None:
    batch = [[Image.fromarray(frame) for frame in stock(clip)] for clip in LEVELS]
    clips = to_clips({"videos": batch}, fps=4.0)
    assert [clip.frames.shape for clip in clips] == [(3, 16, 4, 3)] * 2


def test_alpha_is_kept() -> None:
    assert to_clips({"images": torch.zeros(1, 4, 2, 2)}, fps=0.0)[0].frames.shape == (1, 2, 2, 4)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"latents": torch.zeros(1)}, "neither of videos, images"),
        ({"videos": torch.zeros(1, 3, 2, 2)}, "not 5 dimensions"),
        ({"images": torch.zeros(3, 2, 2)}, "not 4 dimensions"),
        ({"images": torch.zeros(1, 1, 2, 2)}, "neither RGB nor RGBA"),
    ],
)
def test_anything_else_is_an_error(values: dict[str, Any], named: str) -> None:
    with pytest.raises(StageError, match=named):
        to_clips(values, fps=0.0)
