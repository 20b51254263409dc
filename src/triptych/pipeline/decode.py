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


SOUND = "audio"
"""State entry under which decoders of models that make sound leave the samples."""


def sample_rate(pipeline: Any) -> int:
    """Samples per second of the sound that ``pipeline`` makes; 0 for one without a vocoder."""
    config = getattr(getattr(pipeline, "vocoder", None), "config", None)
    return int(getattr(config, "output_sampling_rate", 0))


def to_clips(values: dict[str, Any], *, fps: float, sample_rate: int = 0) -> tuple[Clip, ...]:
    """One clip per output of the batch. ``values`` is the decoder's final state."""
    name = next((name for name in OUTPUTS if values.get(name) is not None), None)
    if name is None:
        raise StageError(f"the decoder left neither of {', '.join(OUTPUTS)}")
    items = _items(name, values[name])
    sounds = _sounds(values.get(SOUND), len(items))
    rate = sample_rate if values.get(SOUND) is not None else 0
    return tuple(
        Clip(frames=_frames(name, item), fps=fps, audio=sound, sample_rate=rate)
        for item, sound in zip(items, sounds, strict=True)
    )


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
    # The layers of one output are pictures of their own.
    return [one for item in batch for one in (item if name == "images" and _is_stack(item) else [item])]


def _is_stack(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, np.ndarray)) and item.ndim == 4


def _sounds(batch: Any, count: int) -> list[np.ndarray[Any, np.dtype[np.float32]] | None]:
    """float32 [channels, samples] of each of ``count`` outputs; None for each when the model makes no sound."""
    if batch is None:
        return [None] * count
    if not isinstance(batch, torch.Tensor) or batch.ndim != 3 or len(batch) != count:
        shape = tuple(batch.shape) if isinstance(batch, torch.Tensor) else type(batch).__name__
        raise StageError(f"the decoder's {SOUND} is {shape}, not samples of {count} outputs by channels")
    return [samples.float().clamp(-1, 1).cpu().numpy() for samples in batch]


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
