"""Pictures as starting points: image-to-image and inpainting with the weights of a text-to-image model."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.config import ModelConfig, Task
from triptych.errors import ModelError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline

from .classic_harness import TOLERATED, png
from .harness import Trio, frames_of

pytestmark = TOLERATED

Checkpoint = Callable[[str], Path]

BAD = {"negative_prompt": "bad"}
TEXT = {"max_sequence_length": 32}
REQUEST = {"prompt": "a red ball", "height": 64, "width": 32, "num_inference_steps": 4, "guidance_scale": 4.0}
FAMILIES: dict[str, tuple[str, str, Task, dict[str, Any]]] = {
    "sdxl_img2img": (
        "sdxl",
        "StableDiffusionXLImg2ImgPipeline",
        "image-to-image",
        BAD | {"strength": 0.5},
    ),
    "sdxl_inpaint": (
        "sdxl",
        "StableDiffusionXLInpaintPipeline",
        "inpainting",
        BAD | {"strength": 0.75},
    ),
    "flux_img2img": ("flux", "FluxImg2ImgPipeline", "image-to-image", TEXT | {"strength": 0.5}),
    "flux_inpaint": ("flux", "FluxInpaintPipeline", "inpainting", TEXT | {"strength": 1.0}),
    "qwen_img2img": (
        "qwen_t2i",
        "QwenImageImg2ImgPipeline",
        "image-to-image",
        TEXT | BAD | {"strength": 0.5},
    ),
    "qwen_inpaint": (
        "qwen_t2i",
        "QwenImageInpaintPipeline",
        "inpainting",
        TEXT | BAD | {"strength": 0.5},
    ),
}
"""Name -> checkpoint, class that is asked of its weights, the task, and more of the request."""


def mask(width: int, height: int, *, transparent: bool = False) -> bytes:
    """White below the middle; or, as OpenAI's clients write it, clear there."""
    made = np.zeros((height, width, 4), np.uint8)
    made[..., 3] = 255
    made[height // 2 :] = (0, 0, 0, 0) if transparent else (255, 255, 255, 255)
    file = io.BytesIO()
    Image.fromarray(made if transparent else made[..., :3]).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, classic_checkpoint: Checkpoint) -> Checkpoint:
    return lambda family: (classic_checkpoint if family == "sdxl" else checkpoint)(family)


@pytest.mark.parametrize("name", FAMILIES)
def test_split_is_the_classic_pipeline(folder: Checkpoint, tmp_path: Path, name: str) -> None:
    import diffusers

    family, kind, task, more = FAMILIES[name]
    model = tmp_path / "model"
    shutil.copytree(folder(family), model)
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": kind}))
    files = [png(32, 64), mask(32, 64)]
    asked = REQUEST | more | {"image": {"blob": 0}}
    given = REQUEST | more | {"image": Image.open(io.BytesIO(files[0])).convert("RGB")}
    if task == "inpainting":
        asked |= {"mask_image": {"blob": 1}}
        given |= {"mask_image": Image.open(io.BytesIO(files[1])).convert("L")}
    if family == "qwen_t2i":
        given["true_cfg_scale"] = given.pop("guidance_scale")
    (clip,) = Trio(model, tmp_path / "roles", encoder_keeps=("vae",)).generate(asked | {"seed": 7}, files)
    whole: Any = getattr(diffusers, kind).from_pretrained(str(model))
    whole.set_progress_bar_config(disable=True)
    if name == "sdxl_img2img":  # it makes the picture's size
        del given["height"], given["width"]
    expected = frames_of(whole(**given, generator=torch.Generator("cpu").manual_seed(7)).images)
    assert clip.frames.std() > 1
    assert np.array_equal(clip.frames, expected)


def test_a_mask_may_be_what_is_transparent(folder: Checkpoint) -> None:
    model = load_pipeline(ModelConfig(path=str(folder("flux")), device="cpu", task="inpainting"), ROLES, "cpu")
    request = REQUEST | {"image": {"blob": 0}, "mask_image": {"blob": 1}, "seed": 1, "max_sequence_length": 16}
    trio = Trio.of(dict.fromkeys(ROLES, model))
    white, clear, other = (
        trio.generate(request, [png(32, 64), file])[0].frames
        for file in (mask(32, 64), mask(32, 64, transparent=True), mask(16, 32))
    )
    assert np.array_equal(white, clear)
    assert np.array_equal(white, other), "a mask is stretched like the picture"


def test_the_schema_of_another_task_names_its_pictures(folder: Checkpoint) -> None:
    config = ModelConfig(path=str(folder("flux")), device="cpu", task="inpainting")
    schema = load_pipeline(config, (Role.DENOISER,), "cpu").schema
    assert (schema.pipeline, schema.task, schema.split) == ("FluxInpaintPipeline", "inpainting", "replay")
    assert [param.name for param in schema.params if param.type == "image"] == ["image", "mask_image"]
    strength = schema.param("strength")
    assert strength is not None
    assert (strength.default, strength.minimum, strength.maximum) == (0.6, 0.0, 1.0)


def test_a_task_that_the_weights_cannot_do_is_refused(folder: Checkpoint) -> None:
    config = ModelConfig(path=str(folder("flux")), device="cpu", task="image-to-video")
    with pytest.raises(ModelError, match="FluxPipeline cannot be served for image-to-video, only for text-to-image"):
        load_pipeline(config, (Role.DECODER,), "cpu")
