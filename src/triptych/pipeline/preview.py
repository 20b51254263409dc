"""Small pictures of what is being denoised, by projecting latents straight to colours.

A VAE's latents are nearly linear in the colours of the patch that they stand for, so a matrix of a few numbers shows
what is coming at no cost. It is fitted by least squares when the denoiser is loaded, from what its own VAE makes of
smooth random colours; the VAE is not kept for it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from triptych.errors import ConfigError
from triptych.wire.messages import MAX_PREVIEW_BYTES
from triptych.wire.schema import Param, RequestSchema

PREVIEW = "preview"
"""The request parameter that asks for them."""

LONGEST_SIDE = 256
"""Of a preview, in pixels."""

_PICTURES = 8
_SIDE = 128


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


def middle_frame(latents: Tensor, height: int, width: int) -> Tensor | None:
    """Of the first output's latents, those of the middle frame, [channels, height, width].

    Latents come as [outputs, channels, frames, h, w], [outputs, channels, h, w], or in rows of two by two patches,
    [outputs, patches, 4 * channels], of a picture of ``height`` by ``width`` pixels. None for any other form.
    """
    first = latents[0]
    match latents.ndim:
        case 5:
            return first[:, first.shape[1] // 2]
        case 4:
            return first
        case 3:
            patches, channels = first.shape[0], first.shape[1] // 4
            rows = round((patches * height / width) ** 0.5)
            if not rows or patches % rows or first.shape[1] % 4:
                return None
            grid = first.view(rows, patches // rows, channels, 2, 2)
            return grid.permute(2, 0, 3, 1, 4).reshape(channels, 2 * rows, 2 * (patches // rows))
        case _:
            return None


def fit(vae: Any, device: torch.device) -> Projection:
    """The projection that fits ``vae``, whose latents are scaled as pipelines scale them for denoising.

    Raises `ConfigError` for one that cannot encode pictures.
    """
    if not hasattr(vae, "encode"):
        raise ConfigError(f"previews: {type(vae).__name__} encodes no pictures, so its latents' colours are unknown")
    coarse = torch.rand(_PICTURES, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    pictures = functional.interpolate(coarse, (_SIDE, _SIDE), mode="bilinear", align_corners=True)
    moving = any(parameter.ndim == 5 for parameter in vae.parameters())
    given = pictures.to(device, vae.dtype)
    with torch.no_grad():
        # one by one: memory for more is not worth having
        made = [vae.encode(p.unsqueeze(2) if moving else p).latent_dist.mode() for p in given.split(1)]
    latents = _scaled(torch.cat(made).float().cpu(), vae.config)
    latents = latents[:, :, 0] if moving else latents
    height, width = latents.shape[-2:]
    colours = functional.adaptive_avg_pool2d(pictures, (height, width))
    known = latents.movedim(1, -1).reshape(-1, latents.shape[1])
    known = torch.cat([known, torch.ones(len(known), 1)], 1)
    found = torch.linalg.lstsq(known, colours.movedim(1, -1).reshape(-1, 3), driver="gelsd").solution
    return Projection(weight=found[:-1].contiguous(), bias=found[-1].contiguous())


def _scaled(latents: Tensor, config: Any) -> Tensor:
    mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and deviation is not None:
        shape = (1, -1, *[1] * (latents.ndim - 2))
        return (latents - torch.tensor(mean).view(shape)) / torch.tensor(deviation).view(shape)
    return (latents - (getattr(config, "shift_factor", None) or 0.0)) * (getattr(config, "scaling_factor", None) or 1.0)


def with_previews(schema: RequestSchema) -> RequestSchema:
    """``schema`` with the parameter that asks for previews."""
    text = "Send small pictures of the result so far with its events."
    param = Param(name=PREVIEW, type="boolean", default=False, description=text)
    return msgspec.structs.replace(schema, params=(*schema.params, param))
