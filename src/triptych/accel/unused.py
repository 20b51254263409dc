"""What nobody has used for long goes from the folder of compiled graphs and kernels, which would only grow."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

SECONDS: Final = 60 * 86400.0
"""How long something may lie unused. It is compiled again when it is asked for after all."""


def forget_unused(graphs: Path, kernels: Path, *, now: float) -> None:
    """Delete graphs (files anywhere below ``graphs``) and kernels (folders in ``kernels``) that were last read or
    written `SECONDS` before ``now`` (Unix time). What cannot be deleted stays.

    Other processes may use the folders, and do the same, at the same time: whatever is missing there counts as never
    compiled. A kernel goes as a whole, because Triton expects its files together.
    """
    freed = count = 0
    for entry, files in (*_each_file(graphs), *_each_folder(kernels)):
        size, used = _measured(files)
        if now - used < SECONDS:
            continue
        with suppress(OSError):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
            freed += size
            count += 1
    if count:
        log.info(
            "removed %d graphs and kernels of %.1f MiB from %s, which were not used for %d days",
            count,
            freed / (1 << 20),
            graphs.parent,
            SECONDS // 86400,
        )


def _each_file(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    for path in _below(folder):
        yield path, [path]


def _each_folder(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    _, names, _ = next(os.walk(folder), ("", [], []))
    for path in (folder / name for name in names):
        if not path.is_symlink():
            yield path, [path, *_below(path)]


def _below(folder: Path) -> list[Path]:
    """All files in a tree, which may change meanwhile (`Path.rglob` would fail of that)."""
    return [Path(parent, name) for parent, _, files in os.walk(folder) for name in files]


def _measured(files: list[Path]) -> tuple[int, float]:
    """Bytes of all, and when the last of them was used; one that is gone was used by nobody."""
    size, used = 0, 0.0
    for path in files:
        with suppress(OSError):
            status = path.lstat()
            times = (status.st_mtime,) if path.is_dir() else (status.st_atime, status.st_mtime)  # walks read folders
            size, used = size + status.st_size, max(used, *times)
    return size, used
