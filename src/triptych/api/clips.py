"""Clips of clients: refused unless they are MP4 or WebM files with pictures of sane size."""

from __future__ import annotations

import io
from typing import cast

import av
from av.error import FFmpegError
from av.video.codeccontext import VideoCodecContext

from triptych.api.pictures import MAX_PIXELS, MAX_SIDE
from triptych.errors import BadRequest
from triptych.wire.clips import ClipFormat, clip_format


def check_clip(field: str, data: bytes, kind: ClipFormat) -> None:
    """Raise `BadRequest` unless ``data`` is a clip. Only the file's head is read; its frames are decoded by the
    instance that works with them."""
    try:
        with av.open(io.BytesIO(data), "r", format=kind) as container:
            # None, whatever PyAV's types say, for a codec that FFmpeg does not know.
            codec = cast("VideoCodecContext | None", container.streams.video[0].codec_context)
            if codec is None:
                raise BadRequest(field, f"{field}: the clip is in a codec that cannot be read here")
            width, height = codec.width, codec.height
    except (FFmpegError, IndexError, ValueError) as error:
        raise BadRequest(field, f"{field}: the file is not a readable MP4 or WebM clip") from error
    if not 0 < max(width, height) <= MAX_SIDE or width * height > MAX_PIXELS:
        raise BadRequest(field, f"{field}: the clip is {width}x{height}; at most {MAX_SIDE} pixels a side are accepted")


def clip_length(data: bytes) -> int | None:
    """Frames of a clip that `check_clip` has let through, where its head says so; None for a still picture too."""
    kind = clip_format(data)
    if kind is None:
        return None
    with av.open(io.BytesIO(data), "r", format=kind) as container:
        return container.streams.video[0].frames or None
