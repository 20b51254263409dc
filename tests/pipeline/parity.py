"""A family whole and in three roles, asked the same: what the parity tests compare."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from triptych.ids import Role

from .harness import Trio, frames_of, latents


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a family is asked, by its classic pipeline's names where they differ."""

    request: Mapping[str, Any]
    guidance: str = "guidance_scale"
    """The classic pipeline's argument."""
    image: bool = False
    encoder_keeps: tuple[str, ...] = ()
    """Weights that the encoder needs besides text and image encoders."""
    rounds: bool = False
    """Whether the two round differently in the last place; else they are bit-identical."""
    classic: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the classic pipeline."""


ROUNDED = 5e-4
"""Share of colours that may fall to the other side of a level where results differ in the last place of float32.

Up to 1.1e-4 was measured (one in 9216); `test_parity.py` shows that a real error of a thousandth changes more.
"""


def assert_alike(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], *, rounds: bool) -> None:
    """Frames in levels of 0..255 are equal; or, if results differ by rounding, by one level in a few places."""
    difference = np.abs(ours.astype(int) - theirs.astype(int))
    assert difference.max() <= rounds
    assert (difference > 0).mean() <= ROUNDED


@dataclass(frozen=True)
class Film:
    """A clip as a file, and the pictures that it holds."""

    frames: list[Image.Image]
    file: bytes

    @classmethod
    def of(cls, request: Mapping[str, Any], seed: int = 0) -> Film:
        """Noise in the size and length that a request asks for."""
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="matroska") as container:
            stream = container.add_stream("ffv1", rate=16)
            stream.width, stream.height, stream.pix_fmt = request["width"], request["height"], "bgr0"
            for number in range(request["num_frames"]):
                container.mux(stream.encode(av.VideoFrame.from_image(picture(request, seed + number))))
            container.mux(stream.encode())
        with av.open(io.BytesIO(buffer.getvalue())) as container:
            return cls([frame.to_image() for frame in container.decode(video=0)], buffer.getvalue())


@dataclass(frozen=True)
class Pair:
    """A family split and whole."""

    case: Case
    trio: Trio
    whole: Any

    def expected(self, request: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
        """Frames of each output of the classic pipeline."""
        arguments = {**self.case.classic, **request}
        arguments = {name: v.frames if isinstance(v, Film) else v for name, v in arguments.items()}
        generator = torch.Generator("cpu").manual_seed(arguments.pop("seed"))
        if "guidance_scale" in arguments:
            arguments[self.case.guidance] = arguments.pop("guidance_scale")
        if "n" in arguments:
            name = "num_videos_per_prompt" if "num_frames" in arguments else "num_images_per_prompt"
            arguments[name] = arguments.pop("n")
        if self.case.image:
            arguments["image"] = picture(arguments)
        output = self.whole(**arguments, generator=generator, output_type="pil")
        return [frames_of(clip) for clip in output.frames] if "frames" in output else [
            frames_of(image if isinstance(image, list) else [image]) for image in output.images
        ]  # fmt: skip

    def split(self, request: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
        """Frames of each output of the three roles. Pictures go as files."""
        pictures = [name for name, value in request.items() if _is_picture(value)]
        request, files = dict(request), list[bytes]()
        if self.case.image:
            request["image"] = picture(request)
            pictures.append("image")
        for name, value in request.items():
            if isinstance(value, Film):
                files.append(value.file)
                request[name] = {"blob": len(files) - 1}
        for name in pictures:
            value = request[name]
            request[name] = [_filed(item, files) for item in value] if isinstance(value, list) else _filed(value, files)
        return [clip.frames for clip in self.trio.generate(request, files)]

    def check(self, request: Mapping[str, Any], **more: Any) -> None:
        """Both give the same, but for rounding where the case says so."""
        request = {**request, **more}
        expected, got = self.expected(request), self.split(request)
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.shape == theirs.shape
            assert ours.std() > 0, "a flat picture proves nothing"
            assert_alike(ours, theirs, rounds=self.case.rounds)


def check_bfloat16(both: Pair, monkeypatch: pytest.MonkeyPatch, seed: int, guidance: float) -> None:
    """A Wan model at its modular blocks in bfloat16 is the classic pipeline, bit for bit, of which the scheduler's step
    and the scaling of latents for the decoder are done in float32, and the scaling of a picture's latents in bfloat16.
    """
    request = {**both.case.request, "num_inference_steps": 4, "guidance_scale": guidance}
    if both.case.image:
        request["image"] = picture(request)
        _scale_pictures_in_bfloat16(both.whole, monkeypatch)
    files: list[bytes] = []
    asked = {name: _filed(value, files) if _is_picture(value) else value for name, value in request.items()}
    asked["seed"] = seed
    inbox = both.trio.encoded(asked, files)
    both.trio.stage(Role.DENOISER, asked, inbox)
    step, vae = both.whole.scheduler.step, both.whole.vae
    monkeypatch.setattr(both.whole.scheduler, "step", lambda noise, *a, **k: step(noise.float(), *a, **k))
    generator = torch.Generator("cpu").manual_seed(seed)
    expected = both.whole(**request, generator=generator, output_type="latent").frames
    assert torch.equal(latents(inbox), expected)

    mean, std = _scales(vae)
    video = vae.decode((expected / (1.0 / std) + mean).to(vae.dtype), return_dict=False)[0]
    (images,) = both.whole.video_processor.postprocess_video(video, output_type="pil")
    (clip,) = both.trio.stage(Role.DECODER, asked, inbox).clips
    assert np.array_equal(clip.frames, frames_of(images))


def _scale_pictures_in_bfloat16(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = whole.prepare_latents
    mean, std = _scales(whole.vae)

    def prepared(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        latents, condition = prepare(*args, **kwargs)
        marks, scaled = condition[:, :-16], condition[:, -16:]  # in float32, of what the VAE made in bfloat16
        encoded = (scaled * std + mean).bfloat16()
        return latents, torch.cat([marks, (encoded - mean.bfloat16()) * (1.0 / std.bfloat16())], dim=1)

    monkeypatch.setattr(whole, "prepare_latents", prepared)


def _scales(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each channel of the latents: [1, channels, 1, 1, 1]."""
    mean, std = (
        torch.tensor(numbers).view(1, -1, 1, 1, 1) for numbers in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def picture(request: Mapping[str, Any], seed: int = 0) -> Image.Image:
    """A picture of noise in the size that a request asks for."""
    pixels = np.random.default_rng(seed).integers(0, 255, (request["height"], request["width"], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def classic(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole pipeline as Diffusers loads it."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(folder), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pairs(cases: Mapping[str, Case], checkpoint: Callable[[str], Path], work: Path) -> Callable[[str], Pair]:
    """Family name -> its pair, loaded once. ``checkpoint`` gives the model folder."""
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            case, folder = cases[family], checkpoint(family)
            made[family] = Pair(case, Trio(folder, work / family, encoder_keeps=case.encoder_keeps), classic(folder))
        return made[family]

    return get


def _is_picture(value: Any) -> bool:
    items: Sequence[Any] = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, Image.Image) for item in items)


def _filed(image: Image.Image, files: list[bytes]) -> dict[str, int]:
    files.append(png(image))
    return {"blob": len(files) - 1}
