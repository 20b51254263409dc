"""Uploaded pictures: refused unless they are plain, readable and of sane size."""

from __future__ import annotations

import io
import warnings

from PIL import Image, UnidentifiedImageError

from triptych.errors import BadRequest

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_SIDE = 8192


def check_picture(field: str, data: bytes) -> None:
    """Raise `BadRequest` unless ``data`` is a PNG, JPEG or WebP file of at most 8192 pixels a side.

    Only the head and the checksums are read here; the decoder of pixels runs in an instance.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size
                picture.verify()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombWarning) as error:
        raise BadRequest(field, f"{field}: the file is not a readable PNG, JPEG or WebP picture") from error
    if max(width, height) > MAX_SIDE:
        raise BadRequest(
            field, f"{field}: the picture is {width}x{height}; at most {MAX_SIDE} pixels a side are accepted"
        )
