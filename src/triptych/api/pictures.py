"""Pictures of clients: refused unless they are plain, readable and of sane size; turned the way they were taken."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Final

from PIL import ExifTags, Image

from triptych.errors import BadRequest

FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_SIDE: Final = 8192
MAX_PIXELS: Final = 50_000_000
UPRIGHT: Final = 1
"""EXIF's number for a picture that is not turned."""
TURNS: Final[Mapping[int, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF's numbers to what sets a picture upright."""
_MARKS: Final = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
"""Where a picture's file says how it is turned."""


def clean_picture(field: str, data: bytes) -> bytes:
    """The picture in ``data``, upright. Raises `BadRequest` unless it is a still PNG, JPEG or WebP file of at most
    8192 pixels a side and 50 million in all.

    It is decoded whole, because a file that is cut short may have a sound head. One that its camera marked as turned
    comes back as PNG, as does one whose marks cannot be read; the bytes of the others stay as they are.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what else Pillow finds odd about a client's file
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                _check_size(field, picture)
                picture.verify()  # checksums, which decoding does not look at
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                picture.load()
                turn = _orientation(picture)
                return data if turn == UPRIGHT else _upright(picture, turn)
    except (BadRequest, MemoryError):
        raise
    except Exception as error:  # what a damaged file makes Pillow raise is not documented, and fails this request alone
        raise BadRequest(field, f"{field}: the file is not a readable PNG, JPEG or WebP picture") from error


def _orientation(picture: Image.Image) -> int | None:
    """How the camera was held, in EXIF's numbers; None where it cannot be read: many a program damages the block.

    It is asked for as the instances ask, after decoding, because files may say it behind their pixels.
    """
    try:
        turn = picture.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:
        return None
    return turn if turn in TURNS else UPRIGHT


def _check_size(field: str, picture: Image.Image) -> None:
    width, height = picture.size
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise BadRequest(
            field,
            f"{field}: the picture is {width}x{height}; at most {MAX_SIDE} pixels a side and {MAX_PIXELS} in all "
            "are accepted",
        )
    # Phones write JPEG files with a second, smaller picture in them; the first one is the picture.
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        raise BadRequest(field, f"{field}: the file holds an animation; must be a still picture")


def _upright(picture: Image.Image, turn: int | None) -> bytes:
    """The picture as a camera that was not turned would have taken it, with no word about turning."""
    upright = picture.copy() if turn is None else picture.transpose(TURNS[turn])
    for mark in _MARKS:
        upright.info.pop(mark, None)
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
