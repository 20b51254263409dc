"""Small pictures of what is being denoised, by projecting latents straight to colours.

A VAE's latents are nearly linear in the colours of the patch that they stand for, so a matrix of a few numbers shows
what is coming at no cost. It is fitted by least squares when the denoiser is loaded, from what its own VAE makes of
smooth random colours; the VAE is not kept for it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.wire.messages import MAX_PREVIEW_BYTES
from triptych.wire.schema import LaunchOption, Param, RequestSchema

PREVIEW = "preview"
"""The request parameter that asks for them."""

LONGEST_SIDE = 256
"""Of a preview, in pixels."""

_PICTURES = 8
_SIDE = 128
_FOR_EACH = 8
"""Latents to fit for each of their channels, at least: a VAE that compresses a lot makes few of a picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """From latents to colours in -1..1."""

    weight: Tensor
    """[channels, 3], float32, in host memory."""
    bias: Tensor
    """[3]."""

    def picture(self, frame: Tensor) -> Callable[[], bytes]:
        """What makes the picture of latents [channels, height, width]. They are copied now, without waiting."""
        done: torch.cuda.Event | None = None
        if frame.is_cuda:
            copied = torch.empty(frame.shape, dtype=frame.dtype, pin_memory=True)
            copied.copy_(frame, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record()
        else:
            copied = frame.clone()

        def make() -> bytes:
            if done is not None:
                done.synchronize()
            return self.encode(copied)

        return make

    def encode(self, frame: Tensor) -> bytes:
        """Latents in host memory as WebP of at most `MAX_PREVIEW_BYTES`; empty in the odd case that it takes more."""
        colours = torch.einsum("chw,cd->hwd", frame.float(), self.weight) + self.bias
        pixels = ((colours.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
        image = Image.fromarray(pixels)
        scale = LONGEST_SIDE / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        file = io.BytesIO()
        image.resize(size, Image.Resampling.BICUBIC).save(file, "webp", quality=70)
        return file.getvalue() if file.tell() <= MAX_PREVIEW_BYTES else b""


def middle_frame(latents: Tensor, *, channels: int, frames: int, height: int, width: int) -> Tensor | None:
    """Of the first output's latents, those of the middle frame, [channels, height, width].

    Latents come as [outputs, channels, frames, h, w], [outputs, channels, h, w], or in rows of square patches, frame
    after frame, [outputs, patches, channels of a patch], of a clip of ``frames`` latent frames of ``height`` by
    ``width`` pixels. None for any other form.
    """
    first = latents[0]
    match latents.ndim:
        case 5:
            return first[:, first.shape[1] // 2]
        case 4:
            return first
        case 3:
            side = math.isqrt(first.shape[1] // channels)
            patches = first.shape[0] // frames
            rows = round((patches * height / width) ** 0.5)
            if side * side * channels != first.shape[1] or patches * frames != first.shape[0]:
                return None
            if not rows or patches % rows:
                return None
            grid = first.unflatten(0, (frames, rows, patches // rows))[frames // 2]
            grid = grid.unflatten(-1, (channels, side, side))
            return grid.permute(2, 0, 3, 1, 4).reshape(channels, side * rows, -1)
        case _:
            return None


def fit(vae: Any, device: torch.device) -> Projection:
    """The projection that fits ``vae``, whose latents are scaled as pipelines scale them for denoising.

    Raises `ConfigError` for one that cannot encode pictures.
    """
    if not hasattr(vae, "encode"):
        raise ConfigError(f"previews: {type(vae).__name__} encodes no pictures, so its latents' colours are unknown")
    random = torch.Generator().manual_seed(0)
    moving = any(parameter.ndim == 5 for parameter in vae.parameters())
    made: list[Tensor] = []
    averages: list[Tensor] = []
    known = wanted = 0
    while len(made) < _PICTURES or known < wanted:  # one by one: memory for more is not worth having
        coarse = torch.rand(1, 3, 5, 5, generator=random) * 2 - 1
        picture = functional.interpolate(coarse, (_SIDE, _SIDE), mode="bilinear", align_corners=True)
        given = picture.to(device, vae.dtype)
        with torch.no_grad():
            seen = vae.encode(given.unsqueeze(2) if moving else given).latent_dist.mode().float().cpu()
        made.append(seen[:, :, 0] if moving else seen)
        averages.append(functional.adaptive_avg_pool2d(picture, (made[-1].shape[-2], made[-1].shape[-1])))
        known += made[-1][0, 0].numel()
        wanted = _FOR_EACH * made[-1].shape[1]
    latents, colours = _scaled(torch.cat(made), vae), torch.cat(averages)
    rows = latents.movedim(1, -1).reshape(-1, latents.shape[1])
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    found = torch.linalg.lstsq(rows, colours.movedim(1, -1).reshape(-1, 3), driver="gelsd").solution
    return Projection(weight=found[:-1].contiguous(), bias=found[-1].contiguous())


def _scaled(latents: Tensor, vae: Any) -> Tensor:
    """Latents [pictures, channels, height, width] as the denoiser knows them."""
    config = vae.config
    factor = getattr(config, "scaling_factor", None) or 1.0
    mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and deviation is not None:
        factor = 1.0  # which pipelines of such a one do not ask for
    else:
        buffers: dict[str, Tensor] = dict(vae.named_buffers())
        mean, deviation = buffers.get("latents_mean"), buffers.get("latents_std")
    if mean is None or deviation is None:
        return (latents - (getattr(config, "shift_factor", None) or 0.0)) * factor
    mean, deviation = (torch.as_tensor(one).float().cpu().view(1, -1, 1, 1) for one in (mean, deviation))
    return (latents - mean) * factor / deviation


def with_previews(schema: RequestSchema) -> RequestSchema:
    """``schema`` with the parameter that asks for previews."""
    text = "Send small pictures of the result so far with its events."
    option = LaunchOption(flag="--previews", roles=(Role.DENOISER,))
    param = Param(name=PREVIEW, type="boolean", default=False, description=text, option=option)
    return msgspec.structs.replace(schema, params=(*schema.params, param))
