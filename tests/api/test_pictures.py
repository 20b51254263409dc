"""Pictures of clients: what is let through, what decoding it takes, and what is refused."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import pytest
from PIL import ExifTags, Image

from tests.jpegs import with_scans
from triptych.api.pictures import MAX_PIXELS, Size, check_picture, decoding_bytes
from triptych.errors import BadRequest
from triptych.pictures import MAX_PARTS, MAX_SCANS


def encoded(kind: str, size: tuple[int, int] = (16, 8), **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 10, 10)).save(buffer, kind, **options)
    return buffer.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(kind, exif=exif)


def looked_at(field: str, data: bytes) -> Size:
    decoding_bytes(field, data)
    return check_picture(field, data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_plain_picture_is_taken(kind: str) -> None:
    assert looked_at("image", encoded(kind)) == (16, 8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(("orientation", "size"), [(1, (16, 8)), (3, (16, 8)), (6, (8, 16)), (8, (8, 16))])
def test_the_size_of_a_turned_picture_is_that_of_it_upright(kind: str, orientation: int, size: Size) -> None:
    assert looked_at("image", turned(kind, orientation)) == size


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
    assert looked_at("image", encoded(kind, exif=exif if kind == "PNG" else b"Exif\0\0" + exif)) == (16, 8)


def test_what_stands_behind_the_pixels_of_a_png_counts_too() -> None:
    plain = encoded("PNG")
    end = plain.index(b"IEND") - 4
    torn = plain[:end] + chunk(b"eXIf", b"II*\0") + plain[end:]
    assert looked_at("image", torn) == (16, 8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = plain[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[end:]
    assert looked_at("image", turned) == (8, 16)


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
        looked_at("image_path", data)
    assert caught.value.field == "image_path"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_cut_in_half_is_refused(kind: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 100).convert("RGB").save(buffer, kind)
    whole = buffer.getvalue()
    assert looked_at("image", whole) == (64, 64)
    with pytest.raises(BadRequest, match="not a readable"):
        looked_at("image", whole[: len(whole) // 2])


def test_a_sound_file_with_too_few_pixels_is_refused() -> None:
    with pytest.raises(BadRequest, match="not a readable"):
        looked_at("image", bomb(100, 100))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    with pytest.raises(BadRequest, match="animation"):
        looked_at("image", buffer.getvalue())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_what_decoding_takes_is_known_by_the_head(kind: str) -> None:
    small, large = decoding_bytes("image", encoded(kind)), decoding_bytes("image", encoded(kind, (1600, 800)))
    assert large == 10_000 * small
    assert 3 * 1600 * 800 <= large <= 16 * 1600 * 800


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    """Symptom: 51 KB of a picture, the last scan of which stood there 700 times, took 3.5 seconds to decode."""
    assert looked_at("image", with_scans(MAX_SCANS)) == (64, 64)
    with pytest.raises(BadRequest, match=f"image: the JPEG has more than {MAX_SCANS} scans"):
        decoding_bytes("image", with_scans(MAX_SCANS + 1))


def test_scans_are_told_from_what_only_looks_like_them() -> None:
    plain = encoded("JPEG", comment=b"\xff\xda" * 1000)
    assert looked_at("image", plain + b"\xff\xda" * 1000) == (16, 8)


def test_what_follows_the_end_of_a_png_is_no_part_of_it() -> None:
    assert looked_at("image", encoded("PNG") + bytes(1_000_000)) == (16, 8)


@pytest.mark.parametrize("hidden", [b"\xff\x05", b"\xff\xd3", b"\xff", b"\xff\0"], ids=repr)
def test_scans_are_counted_behind_what_has_no_length(hidden: bytes) -> None:
    """As libjpeg, which passes over such bytes and reads on."""
    data = with_scans(MAX_SCANS + 1)
    at = data.rindex(b"\xff\xda")
    with pytest.raises(BadRequest, match="scans"):
        decoding_bytes("image", data[:at] + hidden + data[at:])


@pytest.mark.parametrize(
    ("kind", "part", "reason"),
    [
        ("JPEG", b"\xff\xfe\0\2" * (MAX_PARTS + 1), "segments"),
        ("JPEG", b"\xff" * 100_000, "bytes between"),
        ("PNG", chunk(b"abCd", b"") * (MAX_PARTS + 1), f"more than {MAX_PARTS} chunks"),
        ("PNG", chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20))) * 20, "colour profiles"),
    ],
    ids=["comments", "filling", "chunks", "profiles"],
)
def test_a_picture_of_countless_parts_is_refused(kind: str, part: bytes, reason: str) -> None:
    """Symptom: reading the head of such a file took the interpreter from all others for seconds a megabyte."""
    plain = encoded(kind)
    at = 2 if kind == "JPEG" else plain.index(b"IDAT") - 4
    with pytest.raises(BadRequest, match=reason):
        decoding_bytes("image", plain[:at] + part + plain[at:])
