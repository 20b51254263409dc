"""Guiders that change the model for a branch, such as one that passes over layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.config import ModelConfig
from triptych.errors import ConfigError, OutOfMemory
from triptych.ids import ROLES, Role
from triptych.models import EMBEDDED
from triptych.pipeline.load import load_pipeline

from .harness import Trio, latents

REQUEST: dict[str, Any] = {
    "prompt": "a red circle", "seed": 3, "width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 3,
    "guidance_scale": 4.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a guider that has layers passed over."""
    from diffusers import SkipLayerGuidance
    from diffusers.hooks import LayerSkipConfig

    path = tmp_path_factory.mktemp("skipping") / "model"
    shutil.copytree(EMBEDDED["tiny"], path)
    guider = SkipLayerGuidance(
        guidance_scale=4.0,
        skip_layer_guidance_scale=2.8,
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
        skip_layer_config=LayerSkipConfig(indices=[1], fqn="blocks"),
    )
    guider.save_pretrained(path / "guider")
    index = json.loads((path / "model_index.json").read_text())
    index["guider"] = ["diffusers", "SkipLayerGuidance"]
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def denoised(trio: Trio) -> torch.Tensor:
    inbox = trio.encoded(REQUEST)
    trio.stage(Role.DENOISER, REQUEST, inbox)
    return latents(inbox)


def test_a_failure_in_a_branch_leaves_the_model_as_it_was(folder: Path) -> None:
    """Symptom: after one request had run out of memory in the branch without the layer, every later one failed."""
    pipeline = load_pipeline(ModelConfig(path=str(folder), device="cpu"), ROLES, "cpu")
    trio = Trio.of(dict.fromkeys(ROLES, pipeline))
    expected = denoised(trio)
    calls = 0

    def scarce(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # the third of three branches of the second step
            raise torch.OutOfMemoryError("CUDA out of memory")

    transformer = pipeline.component(Role.DENOISER, "transformer")
    handle = transformer.proj_out.register_forward_pre_hook(scarce)
    with pytest.raises(OutOfMemory):
        denoised(trio)
    handle.remove()
    assert torch.equal(denoised(trio), expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batching": True}, "batching"),
        ({"batch_guidance": True}, "batch-guidance"),
        ({"step_cache": 0.1}, "step-cache"),
        ({"profile": "lossless"}, "profile=lossless"),
    ],
)
def test_options_that_take_its_branches_for_alike_are_refused(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: SkipLayerGuidance, the guider of this .*, changes the model"):
        load_pipeline(ModelConfig(path=str(folder), device="cpu", **options), ROLES, "cpu")
