"""What the tests of classic pipelines share: requests by family, the whole pipeline's answer, roles loaded apart."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.pipeline.codec import decode_state
from triptych.pipeline.stage import StageResult, StageRun

from .harness import Trio, finish, frames_of

Checkpoint = Callable[[str], Path]
Trios = Callable[[str], Trio]

TOLERATED = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]
"""What Diffusers' own code provokes: NumPy arrays of tensors, a deprecated helper, autocast of Mochi's decode."""

VIDEO = {"prompt": "a cat runs", "height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16}
IMAGE = {"prompt": "a red ball", "negative_prompt": "bad dog", "height": 32, "width": 32, "num_inference_steps": 3}

REQUESTS: dict[str, dict[str, Any]] = {
    "cogvideox_t2v": VIDEO | {"negative_prompt": "bad dog", "num_frames": 9, "guidance_scale": 6.0},
    "cogvideox_i2v": VIDEO | {"negative_prompt": "bad dog", "num_frames": 9, "guidance_scale": 6.0, "image": True},
    "svd": {"height": 32, "width": 64, "num_frames": 3, "num_inference_steps": 2, "guidance_scale": 3.0, "fps": 7,
            "image": True},
    "hunyuan_video": VIDEO | {"num_frames": 5, "guidance_scale": 4.0},
    "mochi": VIDEO | {"negative_prompt": "bad dog", "num_frames": 7, "guidance_scale": 4.5},
    "sdxl": IMAGE | {"guidance_scale": 5.0},
    "stable_diffusion": IMAGE | {"guidance_scale": 7.5},
    "pixart_sigma": IMAGE | {"guidance_scale": 4.5, "max_sequence_length": 16},
    "sana": IMAGE | {"guidance_scale": 4.5, "max_sequence_length": 16, "num_inference_steps": 2},
    "glm_image": {"prompt": 'a sign "cat"', "height": 32, "width": 32, "num_inference_steps": 2,
                  "guidance_scale": 1.5, "max_sequence_length": 64},
    "hunyuan_image": IMAGE | {"guidance_scale": 6.0},
}  # fmt: skip


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def asked(request: dict[str, Any], **changes: Any) -> tuple[dict[str, Any], list[bytes]]:
    """A request as the role pipelines take it, with its images."""
    request = request | changes
    if "image" not in request:
        return request, []
    return request | {"image": {"blob": 0}}, [png(request["width"], request["height"])]


def whole(folder: Path, request: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What the uncut pipeline gives for the same request: [output][frame, height, width, channel]."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(folder), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    arguments = dict(request)
    if "image" in arguments:
        arguments["image"] = Image.open(io.BytesIO(png(request["width"], request["height"]))).convert("RGB")
    accepted = inspect.signature(pipeline.__call__).parameters
    if "max_guidance_scale" in accepted:
        arguments["max_guidance_scale"] = arguments.pop("guidance_scale")
    elif "guidance_scale" not in accepted:
        scale = arguments.pop("guidance_scale")
        pipeline.guider, pipeline.ocr_guider = (
            guider.new(guidance_scale=scale) for guider in (pipeline.guider, pipeline.ocr_guider)
        )
    count = arguments.pop("n", 1)
    arguments |= {name: count for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in accepted}
    result = pipeline(**arguments, generator=torch.Generator("cpu").manual_seed(seed), output_type="pil")
    return (
        [frames_of(c) for c in result.frames] if hasattr(result, "frames") else [frames_of([i]) for i in result.images]
    )


def denoised(run: StageRun) -> torch.Tensor:
    return latents_of(finish(run))


def latents_of(result: StageResult) -> torch.Tensor:
    """What a denoiser hands to the decoder."""
    (output,) = result.outputs
    entries, _ = decode_state(output.tree, output.tensors, torch.device("cpu"))
    _, (first, *_) = entries["decode"][0]
    return first[1]
