"""Saving memory changes no byte of a result; what does change bytes is in the fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.config import ModelConfig, Offload
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.outfit import home_of

from .adapters import adapter
from .classic_harness import REQUESTS, TOLERATED, asked
from .harness import Trio

REQUEST: dict[str, Any] = {
    "prompt": "a cat", "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 32,
    "seed": 4,
}  # fmt: skip

Checkpoint = Callable[[str], Path]


def trio(folder: Path, **settings: Any) -> Trio:
    whole: Any = load_pipeline(ModelConfig(path=str(folder), device="cpu", **settings), ROLES, "cpu")
    return Trio.of(dict.fromkeys(ROLES, whole))


pytestmark = TOLERATED


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("kind", ["model", "block", "layer"])
def test_offloaded_models_give_the_same_bytes(checkpoint: Checkpoint, kind: Offload) -> None:
    stock, small = trio(checkpoint("wan_t2v")), trio(checkpoint("wan_t2v"), offload=dict.fromkeys(ROLES, kind))
    (expected,), (got,) = stock.generate(REQUEST), small.generate(REQUEST)
    assert np.array_equal(got.frames, expected.frames)
    assert small.pipelines[Role.ENCODER].fingerprint == stock.pipelines[Role.ENCODER].fingerprint
    hook = "_hf_hook" if kind == "model" else "_diffusers_hook"
    assert hasattr(small.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer"), hook)


@pytest.mark.parametrize("kind", ["model", "block", "layer"])
def test_adapters_work_in_offloaded_models(checkpoint: Checkpoint, kind: Offload, tmp_path: Path) -> None:
    folder = checkpoint("wan_t2v")
    layers = ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2")
    loaded: Any = load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.DENOISER,), "cpu")
    model = loaded.component(Role.DENOISER, "transformer")
    loras = (adapter(model, layers, tmp_path / "fox.safetensors"),)
    stock, small = trio(folder, loras=loras), trio(folder, loras=loras, offload={Role.DENOISER: kind})
    seen: list[Any] = []
    for lora in (None, "fox", "fox:0.5", None):
        (expected,), (got,) = (one.generate({**REQUEST, "lora": lora}) for one in (stock, small))
        assert np.array_equal(got.frames, expected.frames), lora
        seen.append(got.frames)
    assert np.array_equal(seen[0], seen[3])
    assert not any(np.array_equal(seen[i], seen[j]) for i, j in ((0, 1), (1, 2), (0, 2)))


@pytest.mark.parametrize("kind", ["model", "block"])
def test_offloading_holds_for_replayed_pipelines(classic_checkpoint: Checkpoint, kind: Offload) -> None:
    folder = classic_checkpoint("hunyuan_video")
    request = asked(REQUESTS["hunyuan_video"], seed=4)[0]
    stock, small = trio(folder), trio(folder, offload=dict.fromkeys(ROLES, kind))
    (expected,), (got,) = stock.generate(request), small.generate(request)
    assert np.array_equal(got.frames, expected.frames)


def test_tiling_and_slicing_reach_the_vae_and_the_fingerprint(checkpoint: Checkpoint) -> None:
    config = ModelConfig(path=str(checkpoint("wan_t2v")), device="cpu", vae_tiling=True, vae_slicing=True)
    decoder: Any = load_pipeline(config, (Role.DECODER,), "cpu")
    vae = decoder.component(Role.DECODER, "vae")
    assert vae.use_tiling
    assert vae.use_slicing
    assert "vae: tiling" in decoder.fingerprint
    assert "vae: slicing" in decoder.fingerprint


def test_weights_that_may_not_fit_are_loaded_to_host_memory() -> None:
    gpu = torch.device("cuda")
    model = ModelConfig(path="tiny", offload={Role.DENOISER: "block"}, quant={Role.ENCODER: "int8"})
    assert [home_of(model, role, gpu).type for role in ROLES] == ["cpu", "cpu", "cuda"]


def test_offloading_and_fast_kernels_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="offload: needs profile stock, not 'fast'"):
        ModelConfig(path="tiny", profile="fast", offload={Role.DENOISER: "block"})
