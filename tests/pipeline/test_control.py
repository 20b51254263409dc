"""Pictures that steer and are no start: control networks, and models that were made for such pictures."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxControlNetModel, FluxControlNetPipeline, FluxControlPipeline, FluxPipeline
from diffusers import FluxTransformer2DModel as Transformer
from PIL import Image

from triptych.ids import ROLES

from .checkpoints import seeded
from .classic_harness import TOLERATED, png
from .harness import Trio, frames_of

pytestmark = TOLERATED

CONTROLLED = {"FluxControlPipeline", "FluxControlNetPipeline"}
"""What is built here."""

REQUEST = {
    "prompt": "a red ball", "height": 64, "width": 32, "num_inference_steps": 2, "guidance_scale": 4.0,
    "max_sequence_length": 32,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "patch_size": 1, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True,
}  # fmt: skip


def control(parts: dict[str, Any]) -> Any:
    """A model whose latents have those of the picture beside them."""
    transformer = seeded(Transformer, in_channels=32, out_channels=16, **SIZES)
    return FluxControlPipeline(**parts | {"transformer": transformer})


def control_net(parts: dict[str, Any]) -> Any:
    """A network beside the model, with weights in its last layers, which begin as zero."""
    network = seeded(FluxControlNetModel, in_channels=16, **SIZES)
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return FluxControlNetPipeline(**parts, controlnet=network)


@pytest.mark.parametrize("build", [control, control_net])
def test_split_is_the_classic_pipeline(
    checkpoint: Callable[[str], Path], tmp_path: Path, build: Callable[[dict[str, Any]], Any]
) -> None:
    source: Any = FluxPipeline.from_pretrained(str(checkpoint("flux")))
    parts = {name: part for name, part in source.components.items() if part is not None}
    whole = build(parts)
    assert type(whole).__name__ in CONTROLLED
    whole.save_pretrained(tmp_path / "model")
    whole.set_progress_bar_config(disable=True)
    trio = Trio(tmp_path / "model", tmp_path / "roles", encoder_keeps=("vae",))
    files = [png(32, 64), png(32, 64, seed=1)]
    first, second = (
        trio.generate(REQUEST | {"seed": 7, "control_image": {"blob": 0}}, [file])[0].frames for file in files
    )
    assert trio.pipelines[ROLES[0]].schema.task == "image-to-image"
    picture = Image.open(io.BytesIO(files[0])).convert("RGB")
    generator = torch.Generator("cpu").manual_seed(7)
    expected = frames_of(whole(**REQUEST, control_image=picture, generator=generator).images)
    assert first.std() > 1
    assert np.array_equal(first, expected)
    assert not np.array_equal(first, second)
