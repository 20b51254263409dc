"""Clips to files: H.264 MP4 through PyAV, still images through Pillow, the same bytes for the same frames everywhere.

Bytes must not depend on the machine, so that runs can be compared by their files: the encoder's thread count is fixed
(x264 cuts its work by it), what it computes otherwise on another processor is left out, the colour conversion runs in
its bit-exact mode, and no time stamps are written.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

import av
import numpy as np
import xxhash
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from av.video.stream import VideoStream
from PIL import Image

from triptych.errors import BadRequest, StageError
from triptych.pipeline.stage import Clip
from triptych.wire.messages import MediaFile

OutputFormat: TypeAlias = Literal["mp4", "png", "jpeg", "webp"]
Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

FORMATS: Final[tuple[OutputFormat, ...]] = ("mp4", "png", "jpeg", "webp")

_MIME: Final[dict[OutputFormat, str]] = {
    "mp4": "video/mp4",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
}
_SUFFIX: Final[dict[OutputFormat, str]] = {"mp4": ".mp4", "png": ".png", "jpeg": ".jpg", "webp": ".webp"}

_STILL_OPTIONS: Final[dict[OutputFormat, dict[str, Any]]] = {
    "png": {"compress_level": 4},  # lossless; higher levels cost seconds at 4K for a few per cent
    "jpeg": {"quality": 95, "subsampling": 0},
    "webp": {"quality": 95, "method": 4},  # lossy: who wants every bit takes png
}

# veryfast takes a third of medium's time for files of equal size. What x264 computes otherwise on other processors is
# left out; of that, AVX-512's macroblock tree even differs from run to run, weighing blocks by memory not written to.
_X264: Final[dict[str, str]] = {"crf": "18", "preset": "veryfast", "x264-params": "cpu-independent=1"}
_X264_THREADS: Final = 4
_CONVERSION: Final = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
_LAYOUTS: Final[dict[int, str]] = {1: "mono", 2: "stereo"}


class EncodingCancelled(Exception):
    """The request was cancelled while its file was being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One finished file in memory. ``width`` and ``height`` are those of the file, in pixels; ``fps`` 0: an image."""

    data: bytes
    mime: str
    suffix: str
    width: int
    height: int
    frames: int
    fps: float

    def describe(self, blob: int) -> MediaFile:
        """Its description on the wire, as raw frame number ``blob``."""
        return MediaFile(
            blob=blob,
            mime=self.mime,
            suffix=self.suffix,
            width=self.width,
            height=self.height,
            frames=self.frames,
            fps=self.fps,
            checksum=xxhash.xxh3_64_intdigest(self.data),
        )


def output_format(clip: Clip, wanted: str | None) -> OutputFormat:
    """The format that ``clip`` is written in: the one asked for, else mp4 for several frames and png for one.

    Raises `BadRequest` for an unknown format, and for a still format when there are several frames.
    """
    frames = len(clip.frames)
    if wanted is None:
        return "mp4" if frames > 1 else "png"
    if wanted not in FORMATS:
        raise BadRequest("output_format", f"output_format={wanted!r}: must be one of {', '.join(FORMATS)}")
    if wanted != "mp4" and frames > 1:
        raise BadRequest("output_format", f"output_format={wanted!r} holds one frame, not {frames}: use mp4")
    return wanted


def encode_clip(clip: Clip, wanted: str | None, *, cancelled: Callable[[], bool] = lambda: False) -> Encoded:
    """Encode one clip in the format ``wanted`` (see `output_format`).

    ``cancelled`` is asked before every frame; a yes raises `EncodingCancelled`. Raises `StageError` for a clip that
    no file can hold, `BadRequest` for a format that cannot hold this clip.
    """
    if clip.frames.ndim != 4 or clip.frames.shape[3] not in (3, 4) or not clip.frames.size:
        raise StageError(f"frames of shape {clip.frames.shape}: must be [frames, height, width, 3 or 4] and not empty")
    chosen = output_format(clip, wanted)
    if chosen != "mp4":
        return _still(next(iter(clip.frames)), chosen)
    data, width, height = _mp4(clip, cancelled)
    return Encoded(
        data=data,
        mime=_MIME["mp4"],
        suffix=_SUFFIX["mp4"],
        width=width,
        height=height,
        frames=len(clip.frames),
        fps=clip.fps,
    )


def _still(frame: Pixels, chosen: OutputFormat) -> Encoded:
    pixels = _opaque(frame) if chosen == "jpeg" else frame
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=chosen, **_STILL_OPTIONS[chosen])
    return Encoded(
        data=buffer.getvalue(),
        mime=_MIME[chosen],
        suffix=_SUFFIX[chosen],
        width=frame.shape[1],
        height=frame.shape[0],
        frames=1,
        fps=0.0,
    )


def _opaque(frame: Pixels) -> Pixels:
    """RGB of ``frame``; transparency is laid over white, which is what viewers show behind it."""
    if frame.shape[2] == 3:
        return frame
    alpha = frame[:, :, 3:].astype(np.uint16)
    blended = (frame[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
    return blended.astype(np.uint8)


def _even(frame: Pixels) -> Pixels:
    """The frame with even sides: 4:2:0 halves the chroma, so an odd side repeats its last line rather than lose it."""
    height, width = frame.shape[:2]
    if height % 2 == 0 and width % 2 == 0:
        return np.ascontiguousarray(frame)
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _mp4(clip: Clip, cancelled: Callable[[], bool]) -> tuple[bytes, int, int]:
    # The index can only be moved to the front (so that players start before the end has arrived) by reading the file
    # again through its name. A memory file has a name, and unlike a temporary file it cannot outlive the process.
    descriptor = os.memfd_create("clip")
    try:
        with av.open(
            f"/proc/self/fd/{descriptor}",
            "w",
            format="mp4",
            container_options={"movflags": "+faststart", "fflags": "+bitexact"},
        ) as container:
            width, height = _write(container, clip, cancelled)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            return file.read(), width, height
    finally:
        os.close(descriptor)


def _write(container: OutputContainer, clip: Clip, cancelled: Callable[[], bool]) -> tuple[int, int]:
    """Encode frame by frame, so that only one frame exists twice; the sound is fed as far as the picture has come."""
    if not clip.fps > 0:
        raise StageError(f"fps={clip.fps}: a video needs a rate greater than 0")
    rate = Fraction(clip.fps).limit_denominator(100_000)
    video = _video_stream(container, rate, clip.frames.shape[1], clip.frames.shape[2])
    sound = None if clip.audio is None else _Sound(container, clip.audio, clip.sample_rate)
    for number, pixels in enumerate(clip.frames):
        if cancelled():
            raise EncodingCancelled
        frame = av.VideoFrame.from_ndarray(_even(_opaque(pixels)), format="rgb24").reformat(
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=_CONVERSION,
            threads=1,
        )
        frame.pts = number
        frame.time_base = 1 / rate
        container.mux(video.encode(frame))
        if sound is not None:
            sound.feed(until=float((number + 1) / rate))
    container.mux(video.encode(None))
    if sound is not None:
        sound.finish()
    return video.width, video.height


def _video_stream(container: OutputContainer, rate: Fraction, height: int, width: int) -> VideoStream:
    stream = container.add_stream("libx264", rate=rate, options=_X264)
    stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
    context = stream.codec_context
    context.thread_count = _X264_THREADS
    context.time_base = 1 / rate
    context.colorspace = Colorspace.ITU709
    context.color_range = ColorRange.MPEG
    context.color_primaries = ColorPrimaries.BT709
    context.color_trc = ColorTrc.BT709
    return stream


class _Sound:
    """The AAC track of a clip, encoded in step with its picture. ``samples``: float32 [channels, samples]."""

    def __init__(self, container: OutputContainer, samples: np.ndarray[Any, np.dtype[np.float32]], rate: int) -> None:
        if samples.ndim != 2 or samples.shape[0] not in _LAYOUTS:
            raise StageError(f"audio of shape {samples.shape}: must be [1 or 2 channels, samples]")
        if not rate > 0:
            raise StageError(f"sample_rate={rate}: audio needs a rate greater than 0")
        self._container = container
        self._samples = samples
        self._rate = rate
        self._layout = _LAYOUTS[samples.shape[0]]
        self._done = 0
        self._stream: AudioStream = container.add_stream(
            "aac", rate=rate, layout=self._layout, options={"flags": "+bitexact"}
        )

    def feed(self, *, until: float) -> None:
        """Encode the samples before ``until`` seconds."""
        self._encode(min(self._samples.shape[1], round(until * self._rate)))

    def finish(self) -> None:
        """Encode the rest and close the track."""
        self._encode(self._samples.shape[1])
        self._container.mux(self._stream.encode(None))

    def _encode(self, end: int) -> None:
        for start, stop in self._chunks(end):
            block = np.ascontiguousarray(self._samples[:, start:stop], dtype=np.float32)
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=self._layout)
            frame.sample_rate = self._rate
            frame.pts = start
            frame.time_base = Fraction(1, self._rate)
            self._container.mux(self._stream.encode(frame))
        self._done = max(self._done, end)

    def _chunks(self, end: int) -> Iterator[tuple[int, int]]:
        for start in range(self._done, end, self._rate):
            yield start, min(end, start + self._rate)
