"""Uploaded images, one file for each job beside the journal: of live jobs, and of videos, which may be remixed."""

from __future__ import annotations

import errno
import os
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from triptych.errors import StorageFailed, StorageFull
from triptych.ids import RequestId
from triptych.server.private import close_to_others, make_folder, open_private

_SUFFIX = ".images"
_decoder = msgspec.msgpack.Decoder(tuple[bytes, ...])

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""How the operating system says that a disk or a quota is full."""


class Uploads:
    """Blocking. A file is there as a whole or not at all, after a power cut too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        """Make the folder. Raises `StorageFailed`."""
        try:
            make_folder(self._folder)
            close_to_others(self._folder)
        except OSError as error:
            raise StorageFailed("the state folder cannot be used", detail=f"{self._folder}: {error}") from error

    def save(self, request: RequestId, images: Sequence[bytes]) -> None:
        """Keep the images of a job; on the disk on return. Raises `StorageFull` or `StorageFailed`."""
        path = self._path(request)
        part = path.with_suffix(".part")
        try:
            with open_private(part) as target:
                target.write(msgspec.msgpack.encode(tuple(images)))
                target.flush()
                os.fsync(target.fileno())
            part.replace(path)
            sync_folder(self._folder)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if error.errno in NO_ROOM:
                raise StorageFull("no room for uploaded images", detail=f"free some space in {self._folder}") from error
            raise StorageFailed("uploaded images cannot be kept", detail=f"{self._folder}: {error}") from error

    def load(self, request: RequestId) -> tuple[bytes, ...]:
        """The images of a job. Raises `StorageFailed` when they are gone or damaged."""
        path = self._path(request)
        try:
            return _decoder.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise StorageFailed(
                f"the uploaded images of {request} cannot be read", detail=f"{path}: {error}"
            ) from error

    def size(self, request: RequestId) -> int:
        """Bytes that the images of a job take; 0 where there are none."""
        try:
            return self._path(request).stat().st_size
        except OSError:
            return 0

    def remove(self, request: RequestId) -> None:
        """Delete the images of a job if there are any."""
        self._path(request).unlink(missing_ok=True)

    def sweep(self, keep: Container[RequestId]) -> None:
        """Delete what belongs to no job of ``keep``: a killed server may leave some behind."""
        for path in self._folder.iterdir():
            if path.suffix == ".part" or (path.suffix == _SUFFIX and RequestId(path.stem) not in keep):
                path.unlink(missing_ok=True)

    def _path(self, request: RequestId) -> Path:
        return self._folder / f"{request}{_SUFFIX}"


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
