"""The files of a request as a pipeline takes them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image

from tests.jpegs import with_scans
from triptych.errors import BadRequest
from triptych.pictures import MAX_SCANS
from triptych.pipeline.families import Pictures
from triptych.pipeline.names import MASK
from triptych.pipeline.pictures import opened

SIZE = (16, 8)


def clear_below(mode: str) -> bytes:
    """A black PNG of a mode whose lower half is transparent."""
    made = np.zeros((SIZE[1], SIZE[0], 4), np.uint8)
    made[: SIZE[1] // 2, :, 3] = 255
    picture = Image.fromarray(made)
    if mode == "P":
        picture = picture.quantize(4)
    if mode == "LA":
        picture = picture.convert("LA")
    buffer = io.BytesIO()
    if mode == "L":  # one shade of grey stands for what is clear
        shades = np.zeros((SIZE[1], SIZE[0]), np.uint8)
        shades[SIZE[1] // 2 :] = 7
        Image.fromarray(shades).save(buffer, "PNG", transparency=7)
    else:
        picture.save(buffer, "PNG")
    with Image.open(io.BytesIO(buffer.getvalue())) as saved:
        assert saved.mode == mode
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_what_is_transparent_in_a_mask_is_made_anew_however_it_is_stored(mode: str) -> None:
    params = {"width": SIZE[0], "height": SIZE[1], MASK: {"blob": 0}}
    mask = np.asarray(opened(Pictures(), params, [clear_below(mode)])[MASK])
    assert (mask[: SIZE[1] // 2] == 0).all()
    assert (mask[SIZE[1] // 2 :] == 255).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_a_mask_without_transparency_is_made_anew_where_it_is_white(mode: str) -> None:
    made = Image.new("RGB", SIZE)
    made.paste((255, 255, 255), (0, 4, 16, 8))
    buffer = io.BytesIO()
    (made.quantize(4) if mode == "P" else made.convert(mode)).save(buffer, "PNG")
    params = {"width": SIZE[0], "height": SIZE[1], MASK: {"blob": 0}}
    mask = np.asarray(opened(Pictures(), params, [buffer.getvalue()])[MASK])
    assert (mask[:4] == 0).all()
    assert (mask[4:] == 255).all()


def quarters(kind: str, exif: bytes, mode: str = "RGB") -> bytes:
    """A picture of 16x8, bright in its upper left quarter."""
    made = Image.new(mode, SIZE)
    made.paste(Image.new(mode, (8, 4), "white" if mode != "CMYK" else (200, 200, 200, 0)), (0, 0))
    buffer = io.BytesIO()
    made.save(buffer, kind, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGB"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("WEBP", "RGB")])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_picture_is_taken_the_way_it_was_seen(kind: str, mode: str, turn: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    size = SIZE if turn < 5 else SIZE[::-1]
    params = {"width": size[0], "height": size[1], "image": {"blob": 0}}
    plain = Image.open(io.BytesIO(quarters(kind, b"", mode))).convert("RGB")
    ways = (None, None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
            Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE,
            Image.Transpose.ROTATE_90)  # fmt: skip
    way = ways[turn]
    seen = opened(Pictures(), params, [quarters(kind, exif.tobytes(), mode)])["image"]
    assert np.array_equal(np.asarray(seen), np.asarray(plain if way is None else plain.transpose(way)))


@pytest.mark.parametrize("exif", [b"II*\0", b"II+\0\x08\0\0\0", b"MM\0*\0\0\0\x08\xff\xff", b"hello"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_damaged_exif_block_turns_nothing(exif: bytes) -> None:
    """Symptom: photographs that a messenger had passed on could not be read."""
    params = {"width": SIZE[0], "height": SIZE[1], "image": {"blob": 0}}
    seen = opened(Pictures(), params, [quarters("JPEG", b"Exif\0\0" + exif)])["image"]
    plain = Image.open(io.BytesIO(quarters("JPEG", b""))).convert("RGB")
    assert np.array_equal(np.asarray(seen), np.asarray(plain))


def test_a_jpeg_of_many_scans_is_refused() -> None:
    params = {"width": SIZE[0], "height": SIZE[1], "image": {"blob": 0}}
    with pytest.raises(BadRequest, match="image: the JPEG has more than"):
        opened(Pictures(), params, [with_scans(MAX_SCANS + 1)])


@pytest.mark.parametrize(("name", "mode"), [("image", "RGB"), ("control_image", "RGB"), (MASK, "L")])
def test_of_sixteen_bits_a_pixel_the_upper_ones_are_seen(name: str, mode: str) -> None:
    """Symptom: of a depth map with 16 bits a pixel nearly all was white."""
    deep = np.linspace(0, 65535, 64, dtype=np.uint16)[None].repeat(8, 0)
    file = io.BytesIO()
    Image.fromarray(deep).save(file, "png")
    found = opened(Pictures(), {name: {"blob": 0}, "width": 64, "height": 8}, [file.getvalue()])[name]
    assert found.mode == mode
    grey = np.asarray(found.convert("L"))
    assert (grey == np.round(deep / 257)).all()
