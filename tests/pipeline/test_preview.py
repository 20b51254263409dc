"""Previews: the colours of what is denoised, small, and only for requests that ask."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.preview import Projection, fit, middle_frame
from triptych.wire.messages import MAX_PREVIEW_BYTES

from .harness import Trio

Checkpoint = Callable[[str], Path]

REQUEST: dict[str, Any] = {
    "prompt": "a red circle moving right on a blue background", "height": 64, "width": 96, "num_frames": 5,
    "num_inference_steps": 4, "seed": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_pipeline(ModelConfig(path="tiny", device="cpu", previews=True), ROLES, "cpu")


def opened(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(float)


def test_a_preview_has_the_colours_of_the_picture_that_comes_of_it(tiny: Any) -> None:
    """The fit is made of the VAE alone; the last preview is held against what the decoder makes."""
    trio = Trio.of(dict.fromkeys(ROLES, tiny))
    params = {**REQUEST, "preview": True}
    inbox = trio.encoded(params)
    run: Any = trio.start(Role.DENOISER, params, inbox)
    pictures: list[bytes] = []
    while (result := run.advance()) is None:
        make = run.preview()
        assert make is not None
        pictures.append(make())
    assert len(pictures) == REQUEST["num_inference_steps"] - 1
    assert all(0 < len(picture) <= MAX_PREVIEW_BYTES for picture in pictures)
    last = opened(pictures[-1])
    assert max(last.shape[:2]) == 256
    for output in result.outputs:
        inbox[output.consumer].append((output.tree, list(output.tensors)))
    (clip,) = trio.stage(Role.DECODER, params, inbox).clips
    frame = Image.fromarray(clip.frames[len(clip.frames) // 2]).resize((last.shape[1], last.shape[0]))
    difference = np.abs(last - np.asarray(frame).astype(float)).mean()
    assert difference < np.abs(last[:, ::-1] - np.asarray(frame)[..., ::-1].astype(float)).mean()
    assert difference < 60


def test_a_request_that_asks_for_none_pays_for_none(tiny: Any) -> None:
    trio = Trio.of(dict.fromkeys(ROLES, tiny))
    run: Any = trio.start(Role.DENOISER, REQUEST, trio.encoded(REQUEST))
    run.advance()
    assert run.preview() is None
    run.cancel()
    assert run.preview() is None


def test_a_denoiser_alone_shows_the_same_as_one_beside_a_decoder(tiny: Any) -> None:
    alone: Any = load_pipeline(ModelConfig(path="tiny", device="cpu", previews=True), (Role.DENOISER,), "cpu")
    assert torch.equal(alone.projection.weight, tiny.projection.weight)
    assert {p.device.type for p in alone.component(Role.DENOISER, "vae").parameters()} == {"meta"}


def test_without_the_option_no_request_can_ask() -> None:
    pipeline = load_pipeline(ModelConfig(path="tiny", device="cpu"), (Role.DECODER,), "cpu")
    assert pipeline.schema.param("preview") is None


def test_a_replayed_loop_cannot_be_looked_into(classic_checkpoint: Checkpoint) -> None:
    config = ModelConfig(path=str(classic_checkpoint("cogvideox_t2v")), device="cpu", previews=True)
    with pytest.raises(ConfigError, match="previews: CogVideoXPipeline is split by replaying"):
        load_pipeline(config, (Role.DENOISER,), "cpu")


def test_a_vae_that_encodes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="previews: Linear encodes no pictures"):
        fit(torch.nn.Linear(2, 2), torch.device("cpu"))


@pytest.mark.parametrize("family", ["ltx", "ltx2", "qwen_t2i", "hunyuan_video15"])
def test_every_step_of_a_loop_over_steps_can_be_seen(checkpoint: Checkpoint, family: str) -> None:
    """Whatever form the loop keeps its latents in; that of the last one is what the decoder is given."""
    pipeline: Any = load_pipeline(ModelConfig(path=str(checkpoint(family)), device="cpu", previews=True), ROLES, "cpu")
    trio = Trio.of(dict.fromkeys(ROLES, pipeline))
    params = {
        "prompt": "a cat", "height": 32, "width": 64, "num_inference_steps": 3, "seed": 1, "preview": True,
        **({} if pipeline.schema.output == "image" else {"num_frames": 9}),
    }  # fmt: skip
    run: Any = trio.start(Role.DENOISER, params, trio.encoded(params))
    pictures: list[bytes] = []
    while run.advance() is None:
        make = run.preview()
        assert make is not None
        pictures.append(make())
    shapes = {opened(picture).shape for picture in pictures}
    assert shapes == {(128, 256, 3)}
    assert len(pictures) == 2


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
def test_a_loop_over_chunks_cannot_be_looked_into(checkpoint: Checkpoint) -> None:
    config = ModelConfig(path=str(checkpoint("helios")), device="cpu", previews=True)
    with pytest.raises(ConfigError, match="previews: HeliosModularPipeline denoises chunk after chunk"):
        load_pipeline(config, (Role.DENOISER,), "cpu")


class Noisy(torch.nn.Module):
    """A VAE of few latents of many channels, three of which are colours; it keeps their mean and deviation itself."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.dtype = SimpleNamespace(scaling_factor=1.0), torch.float32
        self.random = torch.Generator().manual_seed(0)
        self.register_buffer("latents_mean", torch.full((128,), 2.0))
        self.register_buffer("latents_std", torch.full((128,), 4.0))

    def encode(self, pictures: torch.Tensor) -> Any:
        colours = torch.nn.functional.adaptive_avg_pool2d(pictures, 4)
        noise = torch.randn(len(pictures), 125, 4, 4, generator=self.random)
        made = torch.cat([colours, noise], 1)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: made))


def test_latents_of_many_channels_are_fitted_to_enough_pictures_in_the_vaes_own_scale() -> None:
    """To fewer latents than channels, noise would fit as well as colours."""
    projection = fit(Noisy(), torch.device("cpu"))
    assert torch.allclose(projection.weight, torch.eye(128, 3) * 4, atol=0.1)
    assert torch.allclose(projection.bias, torch.full((3,), 2.0), atol=0.1)


@pytest.mark.parametrize("frames", [1, 3])
def test_of_a_clip_the_middle_is_shown(frames: int) -> None:
    latents = torch.arange(frames).float().view(1, 1, frames, 1, 1).expand(2, 4, frames, 2, 3)
    shown = middle_frame(latents, channels=4, frames=frames, height=16, width=24)
    assert shown is not None
    assert shown.shape == (4, 2, 3)
    assert (shown == frames // 2).all()


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("frames", [1, 3])
def test_rows_of_patches_become_a_picture(patch: int, frames: int) -> None:
    clip = torch.arange(2 * frames * 4 * 6).float().view(1, 2, frames, 4, 6)
    split = clip.view(1, 2, frames, 4 // patch, patch, 6 // patch, patch)
    packed = split.permute(0, 2, 3, 5, 1, 4, 6).reshape(1, -1, 2 * patch * patch)

    def shown(latents: torch.Tensor, channels: int = 2) -> torch.Tensor | None:
        return middle_frame(latents, channels=channels, frames=frames, height=32, width=48)

    found = shown(packed)
    assert found is not None
    assert torch.equal(found, clip[0, :, frames // 2])
    assert shown(packed[:, :5]) is None
    assert shown(packed, channels=7) is None
    assert shown(torch.zeros(2, 2)) is None


def test_a_projection_puts_colours_where_they_belong() -> None:
    projection = Projection(weight=torch.eye(3), bias=torch.zeros(3))
    frame = torch.full((3, 4, 8), -1.0)
    frame[0] = 1.0
    pixels = opened(projection.encode(frame))
    assert pixels.shape == (128, 256, 3)
    assert np.abs(pixels.mean((0, 1)) - (255, 0, 0)).max() < 8
