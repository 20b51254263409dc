"""Paths that clients name: they stay within one folder, or are refused."""

from __future__ import annotations

from pathlib import Path

from triptych.errors import BadRequest


def contained(root: Path, field: str, text: str) -> Path:
    """The path ``text`` under ``root``, with links resolved. Raises `BadRequest` for one that leads elsewhere.

    An absolute path is accepted where it already lies under ``root``.
    """
    base = root.resolve()
    if "\0" in text or len(text) > 1024:
        raise BadRequest(field, f"{field}: is not a path")
    try:
        path = (base / text).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadRequest(field, f"{field}={text[:60]!r}: is not a path") from error
    if path == base or not path.is_relative_to(base):
        raise BadRequest(field, f"{field}={text[:60]!r}: leads out of the folder that this server allows")
    return path
