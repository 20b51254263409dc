"""Files of finished clips: what a player sees in them, and that equal frames give equal bytes."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import xxhash
from PIL import Image

from triptych.errors import BadRequest, StageError
from triptych.pipeline.stage import Clip
from triptych.worker.media import EncodingCancelled, encode_clip

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def moving(frames: int = 9, height: int = 64, width: int = 96, channels: int = 3) -> Pixels:
    """A bright square that wanders over a slow gradient: something an encoder likes."""
    out = np.zeros((frames, height, width, channels), np.uint8)
    out[..., 0] = np.linspace(20, 220, width, dtype=np.uint8)
    out[..., 1] = np.linspace(220, 20, height, dtype=np.uint8)[:, None]
    if channels == 4:
        out[..., 3] = 255
    for i in range(frames):
        out[i, 8 + i : 24 + i, 16 + 2 * i : 32 + 2 * i, :3] = (250, 240, 30)
    return out


def read_back(data: bytes) -> tuple[list[Pixels], av.VideoStream]:
    with av.open(io.BytesIO(data)) as container:
        return [f.to_ndarray(format="rgb24") for f in container.decode(video=0)], container.streams.video[0]


def test_a_clip_becomes_an_mp4_that_plays_back_as_it_was() -> None:
    frames = moving()
    done = encode_clip(Clip(frames=frames, fps=8), "mp4")
    assert (done.mime, done.suffix, done.width, done.height, done.frames, done.fps) == (
        "video/mp4", ".mp4", 96, 64, 9, 8,
    )  # fmt: skip
    seen, stream = read_back(done.data)
    assert len(seen) == 9
    assert stream.average_rate == 8
    assert stream.codec_context.name == "h264"
    assert stream.codec_context.pix_fmt == "yuv420p"
    for got, sent in zip(seen, frames, strict=True):
        assert np.abs(got.astype(int) - sent).mean() < 4, "colours or order are wrong"


def test_the_same_frames_give_the_same_bytes_every_time() -> None:
    y, x = np.mgrid[0:32, 0:48]
    waves = [np.stack([x * 5 + i * 9, y * 7 + i * 4, (x + y) * 3 + i * 11], -1) % 256 for i in range(9)]
    clip = Clip(frames=np.stack(waves).astype(np.uint8), fps=16)
    assert len({encode_clip(clip, "mp4").data for _ in range(150)}) == 1


def test_players_can_start_before_the_end_has_arrived() -> None:
    data = encode_clip(Clip(frames=moving(), fps=8), "mp4").data
    assert 0 < data.find(b"moov") < data.find(b"mdat")


def test_equal_frames_give_equal_bytes_on_any_number_of_cores() -> None:
    script = (
        "import sys, xxhash; sys.path.insert(0, sys.argv[1]); from test_media import *; "
        "print(xxhash.xxh3_64_hexdigest(encode_clip(Clip(frames=moving(33, 144, 176), fps=16), 'mp4').data))"
    )
    here = xxhash.xxh3_64_hexdigest(encode_clip(Clip(frames=moving(33, 144, 176), fps=16), "mp4").data)
    core = min(os.sched_getaffinity(0))
    other = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}}); {script}", str(Path(__file__).parent)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert other.stdout.strip() == here


def test_equal_frames_give_equal_bytes_whatever_was_in_memory_before() -> None:
    """x264's code for AVX-512 weighs blocks by memory that it has not written."""
    generator = np.random.default_rng(0)
    small, noise = generator.integers(0, 255, (4, 6, 3), np.uint8), generator.integers(-9, 9, (9, 96, 96, 3))
    drifting = [
        Image.fromarray(np.roll(small, i // 3, axis=1)).resize((96, 96), Image.Resampling.BICUBIC) for i in range(9)
    ]
    clip = Clip(frames=np.clip(np.stack(drifting).astype(int) + noise, 0, 255).astype(np.uint8), fps=16)
    files, litter = set[bytes](), list[bytes]()
    for _ in range(20):
        litter += [os.urandom(int(generator.integers(1, 300_000))) for _ in range(20)]
        del litter[::2]
        files.add(encode_clip(clip, "mp4").data)
    assert len(files) == 1


def test_an_odd_side_keeps_its_last_line() -> None:
    frames = moving(3, 33, 47)
    done = encode_clip(Clip(frames=frames, fps=8), "mp4")
    assert (done.width, done.height) == (48, 34)
    seen, _ = read_back(done.data)
    assert np.abs(seen[1][:33, :47].astype(int) - frames[1]).mean() < 4


def test_a_fractional_rate_is_kept() -> None:
    _, stream = read_back(encode_clip(Clip(frames=moving(4), fps=30000 / 1001), "mp4").data)
    assert stream.average_rate is not None
    assert float(stream.average_rate) == pytest.approx(29.97, abs=0.001)


@pytest.mark.parametrize(("channels", "rate"), [(1, 24000), (2, 48000)])
def test_sound_is_in_the_file_and_as_long_as_the_picture(channels: int, rate: int) -> None:
    seconds = 2
    wave = np.sin(2 * np.pi * 440 * np.arange(seconds * rate) / rate).astype(np.float32)[None].repeat(channels, 0)
    clip = Clip(frames=moving(seconds * 8), fps=8, audio=wave * 0.5, sample_rate=rate)
    data = encode_clip(clip, "mp4").data
    assert data == encode_clip(clip, "mp4").data
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        assert (stream.codec_context.name, stream.rate, stream.channels) == ("aac", rate, channels)
        heard = np.concatenate([f.to_ndarray() for f in container.decode(audio=0)], axis=1)
    assert heard.shape[1] == pytest.approx(seconds * rate, abs=2048)
    middle = heard[0, rate // 2 : rate // 2 + rate]
    assert np.argmax(np.abs(np.fft.rfft(middle))) == pytest.approx(440, abs=1)


@pytest.mark.parametrize(
    ("wanted", "mime", "suffix"),
    [("png", "image/png", ".png"), ("jpeg", "image/jpeg", ".jpg"), ("webp", "image/webp", ".webp")],
)
def test_a_single_frame_becomes_an_image(wanted: str, mime: str, suffix: str) -> None:
    frames = moving(1)
    done = encode_clip(Clip(frames=frames, fps=8), wanted)
    assert (done.mime, done.suffix, done.frames, done.fps) == (mime, suffix, 1, 0)
    seen = np.asarray(Image.open(io.BytesIO(done.data)).convert("RGB"))
    assert np.abs(seen.astype(int) - frames[0]).mean() < 3


def test_png_keeps_every_bit_and_transparency() -> None:
    frames = moving(1, channels=4)
    frames[0, :8, :, 3] = 7
    done = encode_clip(Clip(frames=frames, fps=0), None)
    assert done.suffix == ".png"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(done.data))), frames[0])


def test_transparency_lies_over_white_where_a_format_has_none() -> None:
    frames = np.zeros((1, 16, 16, 4), np.uint8)
    seen = np.asarray(Image.open(io.BytesIO(encode_clip(Clip(frames=frames, fps=0), "jpeg").data)))
    assert seen.min() > 250


def test_the_checksum_is_that_of_the_bytes() -> None:
    done = encode_clip(Clip(frames=moving(1), fps=0), "png")
    file = done.describe(3)
    assert (file.blob, file.checksum) == (3, xxhash.xxh3_64_intdigest(done.data))


def test_a_format_that_cannot_hold_the_clip_is_the_callers_fault() -> None:
    with pytest.raises(BadRequest, match="holds one frame, not 9: use mp4"):
        encode_clip(Clip(frames=moving(), fps=8), "png")
    with pytest.raises(BadRequest, match="must be one of mp4, png, jpeg, webp"):
        encode_clip(Clip(frames=moving(), fps=8), "gif")


def test_a_clip_that_no_file_can_hold_names_its_shape() -> None:
    with pytest.raises(StageError, match=r"\(2, 8, 8, 1\)"):
        encode_clip(Clip(frames=np.zeros((2, 8, 8, 1), np.uint8), fps=8), "mp4")
    with pytest.raises(StageError, match="fps=0"):
        encode_clip(Clip(frames=moving(2), fps=0), "mp4")


def open_files() -> int:
    """How many this process holds; objects of other tests that wait for the collector hold none of them."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_cancelling_ends_the_encoding_before_the_next_frame_and_leaves_no_file_open() -> None:
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    before = open_files()
    with pytest.raises(EncodingCancelled):
        encode_clip(Clip(frames=moving(), fps=8), "mp4", cancelled=cancelled)
    assert asked == 4
    assert open_files() <= before
