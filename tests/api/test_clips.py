"""Clips of clients at the door: MP4 and WebM, or a still picture; formats that name other files are never opened."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from triptych.api.body import Body
from triptych.api.clips import check_clip
from triptych.api.orders import read_order
from triptych.errors import BadRequest
from triptych.wire.clips import clip_format
from triptych.wire.schema import Param, RequestSchema


def film(kind: str, codec: str, width: int = 64, height: int = 48, frames: int = 3) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((height, width, 3), np.uint8))))
        container.mux(stream.encode())
    return buffer.getvalue()


def still() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


SCHEMA = RequestSchema(
    model="m",
    pipeline="WanVACEPipeline",
    split="replay",
    task="text-to-video",
    output="video",
    params=(
        Param(name="prompt", type="string", required=True),
        Param(name="reference_images", type="images", nullable=True, max_length=2),
        Param(name="video", type="video", nullable=True),
        Param(name="mask", type="video", nullable=True, needs="video"),
        Param(name="num_frames", type="integer", default=5, minimum=1, maximum=9),
    ),
)


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("matroska", "ffv1")])
def test_a_clip_passes(kind: str, codec: str) -> None:
    data = film(kind, codec)
    found = clip_format(data)
    assert found is not None
    check_clip("video", data, found)


@pytest.mark.parametrize(
    "data",
    [
        b"\x1a\x45\xdf\xa3 and no more",
        b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom",
    ],
)
def test_a_clip_that_is_no_more_than_its_first_bytes_is_refused_by_name(data: bytes) -> None:
    kind = clip_format(data)
    assert kind is not None
    with pytest.raises(BadRequest, match="video: the file is not a readable") as caught:
        check_clip("video", data, kind)
    assert caught.value.field == "video"


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"RIFF\0\0\0\0AVI LIST",
        b"",
    ],
)
def test_formats_that_name_other_files_are_no_clips(data: bytes) -> None:
    assert clip_format(data) is None


def test_an_order_refers_to_its_files_by_number() -> None:
    clip = film("mp4", "libx264", frames=5)
    uploads = {"video": [clip], "mask": [still()], "reference_images": [still(), still()]}
    order = read_order(SCHEMA, Body(fields={"prompt": "a"}, uploads=uploads), "video")
    assert order.params["video"] == {"blob": 0}
    assert order.params["mask"] == {"blob": 1}
    assert order.params["reference_images"] == [{"blob": 2}, {"blob": 3}]
    assert order.images[0] == clip


@pytest.mark.parametrize(("name", "files"), [("video", 2), ("reference_images", 3)])
def test_too_many_files_are_refused(name: str, files: int) -> None:
    with pytest.raises(BadRequest, match=f"{name}: has {files} files"):
        read_order(SCHEMA, Body(fields={"prompt": "a"}, uploads={name: [still()] * files}), "video")


def test_a_mask_without_a_clip_is_refused() -> None:
    with pytest.raises(BadRequest, match="mask: is of no use without video"):
        read_order(SCHEMA, Body(fields={"prompt": "a"}, uploads={"mask": [still()]}), "video")


def test_a_clip_shorter_than_what_is_to_be_made_of_it_is_refused() -> None:
    uploads = {"video": [film("mp4", "libx264")]}
    with pytest.raises(BadRequest, match="video: the clip has 3 frames; num_frames=5 are asked for"):
        read_order(SCHEMA, Body(fields={"prompt": "a"}, uploads=uploads), "video")
    order = read_order(SCHEMA, Body(fields={"prompt": "a", "num_frames": 3}, uploads=uploads), "video")
    assert order.params["num_frames"] == 3


def test_a_clip_in_a_codec_that_nobody_knows_is_refused() -> None:
    """Symptom: such a clip was answered with 500."""
    data = film("mp4", "libx264").replace(b"avc1", b"zzz1").replace(b"avcC", b"zzzC")
    with pytest.raises(BadRequest, match="a codec that cannot be read here"):
        check_clip("video", data, "mp4")
