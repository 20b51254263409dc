"""Three processes' worth of roles against the whole classic pipeline, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .harness import Trio, frames_of

WAN = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", "height": 32, "width": 48, "num_frames": 9,
    "num_inference_steps": 4, "max_sequence_length": 32,
}  # fmt: skip
QWEN = {
    "prompt": "a cat", "negative_prompt": "bad", "height": 64, "width": 48, "num_inference_steps": 4,
    "max_sequence_length": 64,
}  # fmt: skip


def classic(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(folder), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def wan(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trio, Any]]:
    return Trio(checkpoint("wan_t2v"), tmp_path_factory.mktemp("wan")), classic(checkpoint("wan_t2v"))


@pytest.fixture(scope="module")
def qwen(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trio, Any]]:
    return Trio(checkpoint("qwen_t2i"), tmp_path_factory.mktemp("qwen")), classic(checkpoint("qwen_t2i"))


@pytest.mark.parametrize(
    ("seed", "steps", "guidance"), [(0, 4, 6.0), (1, 2, 1.0), (2**40 + 7, 1, 3.5), (3, 5, 1.0), (4, 6, 9.0)]
)
def test_wan_split_is_the_classic_pipeline(wan: tuple[Trio, Any], seed: int, steps: int, guidance: float) -> None:
    trio, whole = wan
    request = WAN | {"num_inference_steps": steps, "guidance_scale": guidance}
    expected = whole(**request, generator=torch.Generator("cpu").manual_seed(seed), output_type="pil").frames
    (clip,) = trio.generate(request | {"seed": seed, "fps": 12})
    assert np.array_equal(clip.frames, frames_of(expected[0]))
    assert clip.fps == 12


@pytest.mark.parametrize(("seed", "steps", "guidance"), [(0, 4, 4.0), (1, 2, 1.0), (2, 3, 2.5), (3, 6, 7.0)])
def test_qwen_split_is_the_classic_pipeline(qwen: tuple[Trio, Any], seed: int, steps: int, guidance: float) -> None:
    trio, whole = qwen
    request = QWEN | {"num_inference_steps": steps}
    generator = torch.Generator("cpu").manual_seed(seed)
    expected = whole(**request, true_cfg_scale=guidance, generator=generator, output_type="pil").images
    (clip,) = trio.generate(request | {"seed": seed, "guidance_scale": guidance})
    assert np.array_equal(clip.frames, frames_of(expected))
