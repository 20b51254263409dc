"""Clips of a request as lists of pictures."""

from __future__ import annotations

import io

import av
from av.error import FFmpegError
from PIL import Image, ImageOps

from triptych.errors import BadRequest
from triptych.wire.clips import ClipFormat

MAX_FRAMES = 257
"""Of a clip whose length nothing else says."""


def clip_frames(
    name: str, data: bytes, kind: ClipFormat, size: tuple[int, int], frames: int | None, most_pixels: int
) -> list[Image.Image]:
    """The first ``frames`` pictures of a clip, cut to ``size`` (width, height); all of them if None, at most
    `MAX_FRAMES`. Raises `BadRequest` for a clip that is shorter or cannot be decoded."""
    found: list[Image.Image] = []
    try:
        with av.open(io.BytesIO(data), "r", format=kind) as container:
            for frame in container.decode(container.streams.video[0]):
                if frame.width * frame.height > most_pixels:
                    raise BadRequest(name, f"{name}: {frame.width}x{frame.height} exceeds {most_pixels} pixels")
                found.append(ImageOps.fit(frame.to_image(), size, Image.Resampling.LANCZOS))
                if len(found) == (frames or MAX_FRAMES):
                    break
    except (FFmpegError, IndexError, ValueError) as error:
        raise BadRequest(name, f"{name}: cannot be decoded: {error}") from error
    if len(found) < (frames or 1):
        raise BadRequest(name, f"{name}: the clip has {len(found)} frames, num_frames={frames or 1} are asked for")
    return found
