"""What files of clips are taken: MP4 and Matroska (WebM), told by how they begin and never by what they say of others.

FFmpeg knows formats that are lists of further addresses to open; naming the format keeps it from these.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

ClipFormat: TypeAlias = Literal["mp4", "matroska"]

_MATROSKA = b"\x1a\x45\xdf\xa3"


def clip_format(data: bytes) -> ClipFormat | None:
    """FFmpeg's name of the format of a file's content; None for what is neither."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data.startswith(_MATROSKA) else None
