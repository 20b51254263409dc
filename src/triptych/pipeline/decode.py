"""Decoder outputs to frames, rounded as stock Diffusers rounds when it makes PIL images: nearest, ties to even.

(`diffusers.utils.export_to_video` truncates instead, which darkens by half a level; that is not followed.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from triptych.errors import StageError
from triptych.pipeline.stage import Clip

OUTPUTS = ("videos", "images")
"""State entries under which decoders leave frames."""


def to_clips(values: dict[str, Any], *, fps: float) -> tuple[Clip, ...]:
    """One clip per output of the batch. ``values`` is the decoder's final state."""
    name = next((name for name in OUTPUTS if values.get(name) is not None), None)
    if name is None:
        raise StageError(f"the decoder left neither of {', '.join(OUTPUTS)}")
    batch = values[name]
    return tuple(Clip(frames=_frames(name, item), fps=fps) for item in _items(name, batch))


def to_pixels(frames: torch.Tensor) -> torch.Tensor:
    """Frames [frames, channels, height, width] (or one without the first dimension) in 0..1 as uint8, channels last."""
    frames = frames if frames.ndim == 4 else frames[None]
    return (frames.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _items(name: str, batch: Any) -> list[Any]:
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        least = 5 if name == "videos" else 4
        if batch.ndim != least:
            raise StageError(f"the decoder's {name} have shape {tuple(batch.shape)}, not {least} dimensions")
        return list(batch)
    return list(batch)


def _frames(name: str, item: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [frames, height, width, channels] of one output in 0..1 (channels first if a tensor), or of PIL images."""
    if isinstance(item, torch.Tensor):
        pixels = to_pixels(item).cpu().numpy()
    elif isinstance(item, np.ndarray):
        frames = item if item.ndim == 4 else item[None]
        pixels = (frames * 255).round().astype(np.uint8)
    else:
        images: list[Image.Image] = item if isinstance(item, list) else [item]
        pixels = np.stack([np.asarray(image) for image in images])
    if pixels.ndim != 4 or pixels.shape[3] not in (3, 4):
        raise StageError(f"the decoder's {name} give frames of shape {pixels.shape}, neither RGB nor RGBA")
    return pixels
