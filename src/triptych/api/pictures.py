"""Pictures of clients: refused unless they are plain, readable and of sane size. What is let through stays as it is;
the instances set upright what a camera marked as turned."""

from __future__ import annotations

import io
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, TypeAlias

from PIL import Image

from triptych.errors import BadRequest
from triptych.pictures import FORMATS, objection, turn_of

MAX_SIDE: Final = 8192
MAX_PIXELS: Final = 50_000_000

Size: TypeAlias = tuple[int, int]
"""Width and height in pixels."""

_PLANES: Final = ("1", "L", "P")
"""Modes of which Pillow holds a byte a pixel; it is four of all others, at the most."""
_WEBP_BYTES: Final = 16
"""A pixel: two canvases of the decoder's, and what it and Pillow make of them."""
_LAYER_BYTES: Final = 2
"""A pixel and colour of a JPEG in several scans, whose coefficients are held until the last one."""


def decoding_bytes(field: str, data: bytes) -> int:
    """Memory that `check_picture` takes for the picture in ``data``, by its head. Raises `BadRequest` unless it is a
    still PNG, JPEG or WebP file of at most 8192 pixels a side and 50 million in all, of no more parts than it needs.
    """
    if (reason := objection(data)) is not None:
        raise BadRequest(field, f"{field}: {reason}")
    with _opened(field, data) as picture:
        _check_size(field, picture)
        pixels = picture.width * picture.height
        match picture.format:
            case "WEBP":
                return pixels * _WEBP_BYTES
            case "PNG":
                return pixels * (1 if picture.mode in _PLANES else 4)
            case _:
                return pixels * _LAYER_BYTES * len(picture.getbands())


def check_picture(field: str, data: bytes) -> Size:
    """The size, upright, of a picture whose head `decoding_bytes` has let through. Raises `BadRequest` when the rest of
    it cannot be read.

    It is decoded whole, because a file that is cut short may have a sound head; a JPEG to an eighth of its size, which
    takes all of the file and little memory.
    """
    with _opened(field, data) as picture:
        picture.verify()  # checksums, which decoding does not look at
    with _opened(field, data) as picture:
        width, height = picture.size
        picture.draft(None, (1, 1))
        picture.load()
        return (width, height) if turn_of(picture) < 5 else (height, width)  # from 5 on it lies on its side


@contextmanager
def _opened(field: str, data: bytes) -> Generator[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what else Pillow finds odd about a client's file
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                yield picture
    except (BadRequest, MemoryError):
        raise
    except Exception as error:  # what a damaged file makes Pillow raise is not documented, and fails this request alone
        raise BadRequest(field, f"{field}: the file is not a readable PNG, JPEG or WebP picture") from error


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
