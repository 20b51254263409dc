"""Files and folders that the server's user alone can read: prompts and pictures are nobody else's business."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_OWNER_ONLY = 0o077


def make_folder(path: Path) -> None:
    """Make a folder that nobody else can enter. One that is there keeps the rights that somebody gave it: it may be
    anything, the system's own temporary folder included. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        return
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")


def open_private(path: Path) -> BinaryIO:
    """Open a file of our own to be written anew. Raises `OSError`."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def close_to_others(*paths: Path) -> None:
    """Take from others what an earlier version let them have of files or folders of our own, where that can be done."""
    for path in paths:
        with suppress(OSError):
            if path.stat().st_mode & _OWNER_ONLY:
                path.chmod(path.stat().st_mode & ~_OWNER_ONLY)
