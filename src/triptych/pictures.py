"""Pictures that clients sent, as the door and the instances read them: of how many parts, and which way up.

What is counted here is cheap to count, and what decoding a file costs beyond its pixels grows with it: an empty scan of
a progressive JPEG has a few bytes, and has every block of the picture looked at once more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from PIL import ExifTags, Image

FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_SCANS: Final = 100
"""Of a JPEG. Encoders write about ten."""
MAX_PARTS: Final = 1 << 14
"""Segments of a JPEG or chunks of a PNG: 2 KB each in a file of 32 MiB."""
MAX_PROFILES: Final = 16
"""Colour profiles of a PNG, which are unpacked one by one; it should have one at most."""
MAX_FILLING: Final = 64 << 10
"""Bytes before the first scan of a JPEG that are in no segment."""
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

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""Where a segment of a JPEG begins; those with other numbers have no length, and end no scan."""
_END, _SCAN = 0xD9, 0xDA


def objection(data: bytes) -> str | None:
    """What is wrong with the parts of a picture's file, in words; None where decoding it costs what its pixels do."""
    if data.startswith(_PNG):
        return _png_objection(data)
    return _jpeg_objection(data) if data.startswith(_JPEG) else None


def _png_objection(data: bytes) -> str | None:
    at, parts, profiles = len(_PNG), 0, 0
    while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
        parts += 1
        profiles += data[at + 4 : at + 8] == b"iCCP"
        if parts > MAX_PARTS:
            return f"the PNG has more than {MAX_PARTS} chunks"
        if profiles > MAX_PROFILES:
            return f"the PNG has more than {MAX_PROFILES} colour profiles"
        at += 12 + int.from_bytes(data[at : at + 4])
    return None


def _jpeg_objection(data: bytes) -> str | None:
    """Segments are told apart as libjpeg does, which passes over whatever stands between them; what a segment holds,
    a smaller picture for instance, is no part of this one, nor is what follows its end."""
    at, parts, scans, filling = len(_JPEG), 0, 0, 0
    while (marker := _MARKER.search(data, at)) is not None and data[marker.start() + 1] != _END:
        parts += 1
        filling += 0 if scans else marker.start() - at
        scans += data[marker.start() + 1] == _SCAN
        if scans > MAX_SCANS:
            return f"the JPEG has more than {MAX_SCANS} scans"
        if parts > MAX_PARTS or filling > MAX_FILLING:
            return f"the JPEG has more than {MAX_PARTS} segments, or {MAX_FILLING} bytes between them"
        at = marker.end() + max(2, int.from_bytes(data[marker.end() : marker.end() + 2]))
    return None


def turn_of(picture: Image.Image) -> int:
    """How the camera was held, in EXIF's numbers; `UPRIGHT` where the file does not say it, or nothing that can be
    read: many a program damages the block. A PNG is decoded for it, because it may say it behind its pixels."""
    try:
        turn = picture.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # what a damaged block makes Pillow raise is not documented
        return UPRIGHT
    return turn if turn in TURNS else UPRIGHT


def upright(picture: Image.Image) -> Image.Image:
    """The picture as a camera that was not turned would have taken it."""
    turn = turn_of(picture)
    return picture if turn == UPRIGHT else picture.transpose(TURNS[turn])
