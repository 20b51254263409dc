"""JPEG files that nobody's camera writes."""

from __future__ import annotations

import io

from PIL import Image


def with_scans(count: int, side: int = 64) -> bytes:
    """A progressive JPEG of one colour and ``count`` scans, of which all but a few are the last one again."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 77).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * (count - whole.count(b"\xff\xda")) + whole[-2:]
