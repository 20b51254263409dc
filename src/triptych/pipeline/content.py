"""What a model folder holds, in a short string that is told within moments: two snapshots of a model differ in it.

Of each file of weights its size, its beginning (of safetensors: the names, types and shapes of all tensors) and a few
pieces spread over the rest are read, not all of it, which would take as long as loading does. Another training of the
same architecture changes nearly every number, so that pieces tell; a change of single numbers in a large file may be
missed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
_SETTINGS = (".json", ".txt", ".model")
"""Configs, indices and what tokenizers are made of: small, read as a whole."""
_DEPTH = 2
"""Folders within folders: that of a component, and one in it. Links may lead in circles."""
_BEGINNING = 1 << 16
_PIECES, _PIECE = 16, 4096


def content_of(path: Path) -> str:
    """A digest of a model's folder, or of one file. A snapshot in the cache of the Hub has its revision for it, since
    it may hold only what some roles need. Raises OSError."""
    if path.parent.name == "snapshots":
        return f"revision {path.name[:12]}"
    digest = hashlib.sha256()
    for name, file in _files(path):
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb", buffering=0) as opened:
            if size <= _BEGINNING or file.suffix in _SETTINGS:
                digest.update(opened.read(size))
                continue
            digest.update(opened.read(_BEGINNING))
            for i in range(1, _PIECES + 1):
                digest.update(os.pread(opened.fileno(), _PIECE, (size - _PIECE) * i // _PIECES))
    return f"content {digest.hexdigest()[:12]}"


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """What counts of a folder, by its name in it, in the order of names; of a file itself, whatever its name."""
    if path.is_file():
        yield "", path
        return
    for folder, folders, files in os.walk(path, followlinks=True):
        deep = len(Path(folder).relative_to(path).parts) >= _DEPTH
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(folder, name)
            if file.suffix in (*_WEIGHTS, *_SETTINGS) and not name.startswith("."):
                yield file.relative_to(path).as_posix(), file
