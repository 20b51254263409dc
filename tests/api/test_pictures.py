"""Pictures of clients: what is let through as it is, what is turned upright, and what is refused."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import pytest
from PIL import ExifTags, Image, ImageOps

from triptych.api.pictures import MAX_PIXELS, clean_picture
from triptych.errors import BadRequest


def encoded(kind: str, size: tuple[int, int] = (16, 8), **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 10, 10)).save(buffer, kind, **options)
    return buffer.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(kind, exif=exif)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_plain_picture_stays_as_it_is(kind: str) -> None:
    data = encoded(kind)
    assert clean_picture("image", data) is data


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(("orientation", "size"), [(1, (16, 8)), (3, (16, 8)), (6, (8, 16)), (8, (8, 16))])
def test_a_turned_picture_comes_upright(kind: str, orientation: int, size: tuple[int, int]) -> None:
    with Image.open(io.BytesIO(clean_picture("image", turned(kind, orientation)))) as picture:
        assert picture.size == size
        assert picture.getexif().get(ExifTags.Base.Orientation, 1) == 1


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


TORN = [
    b"",
    b"II",
    b"II*\0",
    b"II+\0\x08\0\0\0",
    b"MM\0*\0\0\0\x08\xff\xff",
    b"II*\0\xff\xff\xff\xff",
    b"Exif\0\0II*\0",
    b"hello",
]
"""EXIF blocks that programs have damaged."""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("exif", TORN)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_picture_with_a_damaged_exif_block_is_taken(kind: str, exif: bytes) -> None:
    """Symptom: photographs that a messenger had passed on were answered with 500."""
    cleaned = clean_picture("image", encoded(kind, exif=exif if kind == "PNG" else b"Exif\0\0" + exif))
    with Image.open(io.BytesIO(cleaned)) as picture:
        assert ImageOps.exif_transpose(picture).size == (16, 8)  # as the instances do


def test_what_stands_behind_the_pixels_of_a_png_counts_too() -> None:
    plain = encoded("PNG")
    end = plain.index(b"IEND") - 4
    torn = plain[:end] + chunk(b"eXIf", b"II*\0") + plain[end:]
    with Image.open(io.BytesIO(clean_picture("image", torn))) as picture:
        assert ImageOps.exif_transpose(picture).size == (16, 8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = plain[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[end:]
    with Image.open(io.BytesIO(clean_picture("image", turned))) as picture:
        assert picture.size == (8, 16)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a readable"),
        (b"hello", "not a readable"),
        (b"GIF89a" + b"\0" * 100, "not a readable"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable"),
        (encoded("GIF"), "not a readable"),
        (encoded("TIFF"), "not a readable"),
        (encoded("BMP"), "not a readable"),
        (encoded("PNG")[:-30], "not a readable"),
        (bomb(9000, 9), "9000x9"),
        (bomb(8000, 8000), str(MAX_PIXELS)),
        (bomb(60_000, 60_000), "not a readable|60000x60000"),
        (bomb(2**31 - 1, 2**31 - 1), "not a readable|2147483647"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_sane_picture_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        clean_picture("image_path", data)
    assert caught.value.field == "image_path"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_cut_in_half_is_refused(kind: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 100).convert("RGB").save(buffer, kind)
    whole = buffer.getvalue()
    assert clean_picture("image", whole) is whole
    with pytest.raises(BadRequest, match="not a readable"):
        clean_picture("image", whole[: len(whole) // 2])


def test_a_sound_file_with_too_few_pixels_is_refused() -> None:
    with pytest.raises(BadRequest, match="not a readable"):
        clean_picture("image", bomb(100, 100))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    with pytest.raises(BadRequest, match="animation"):
        clean_picture("image", buffer.getvalue())
