"""Pictures of clients: refused unless they are plain, readable and of sane size; turned the way they were taken."""

from __future__ import annotations

import io
import warnings
from typing import Final

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from triptych.errors import BadRequest

FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_SIDE: Final = 8192
MAX_PIXELS: Final = 50_000_000


def clean_picture(field: str, data: bytes) -> bytes:
    """The picture in ``data``, upright. Raises `BadRequest` unless it is a still PNG, JPEG or WebP file of at most
    8192 pixels a side and 50 million in all.

    It is decoded whole, because a file that is cut short may have a sound head. One that its camera marked as turned
    comes back as PNG; the bytes of the others stay as they are.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                _check_size(field, picture)
                exif = Image.Exif()
                exif.load(picture.info.get("exif", b""))
                picture.verify()  # checksums, which decoding does not look at
            if exif.get(ExifTags.Base.Orientation, 1) not in (0, 1):
                return _upright(data)
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                picture.load()
            return data
    except (
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombWarning,
        Image.DecompressionBombError,
    ) as error:
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


def _upright(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
        upright = ImageOps.exif_transpose(picture)
        upright.info.pop("exif", None)
        upright.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
