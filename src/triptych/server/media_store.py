"""Where finished media files are kept: the seam, and the store in one local folder.

Files are named by job id and written so that a reader never sees half a file.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import xxhash

from triptych.errors import StorageFailed, StorageFull
from triptych.ids import RequestId
from triptych.server.private import make_folder
from triptych.server.records import StoredFile
from triptych.server.uploads import NO_ROOM, sync_folder
from triptych.wire.messages import MediaFile

_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")
_REQUEST = re.compile(r"(video|image)_[0-9a-f]{32}")
STORE_NAME = re.compile(r"(?:video|image)_[0-9a-f]{32}(?:-\d+)?\.[a-z0-9]{1,8}")
"""Names of files in a store."""
_PART = ".part"
_PROBE = f".triptych-probe{_PART}"


class MediaStore(Protocol):
    """Blocking; the server calls it in a thread pool. Names are made of minted ids, never of what a client sent."""

    def open(self) -> None:
        """Make ready, and clear away what a killed server left half written. Raises `StorageFailed`."""
        ...

    def look(self) -> None:
        """Raise `StorageFull` or `StorageFailed` when files could not be stored at the moment, as far as one can tell.
        What is missing is made again where `open` would make it."""
        ...

    def check_room(self) -> None:
        """Raise `StorageFull` while the bytes that did not fit the last time still would not."""
        ...

    def place(self, file: StoredFile) -> StoredFile:
        """A file of an earlier life of the server as this store has it."""
        ...

    def find(self, name: str) -> StoredFile | None:
        """A file that another server has put into this store; None when there is none. Raises `StorageFailed`."""
        ...

    def store(self, request: RequestId, files: Sequence[tuple[MediaFile, bytes]]) -> tuple[StoredFile, ...]:
        """Keep all files of a job, or none of them.

        Raises `StorageFull` when there is no room, and `StorageFailed` for bytes that arrived damaged, a suffix
        that is none, or a store that cannot be written.
        """
        ...

    def remove(self, files: Iterable[StoredFile]) -> None:
        """Delete files of this store; raises `StorageFailed` for one that is there and cannot be deleted."""
        ...


class LocalMedia:
    """One folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._wanted = 0
        """Bytes that there was no room for at the last failure; 0 when nothing failed."""
        self._failed = False
        """Whether the last file could not be written."""

    def open(self) -> None:
        """Make the folder, clear away what a killed server left half written, and try that files can be written.
        Raises `StorageFailed`."""
        try:
            make_folder(self.root)
            for part in self.root.glob(f".*{_PART}"):
                part.unlink(missing_ok=True)
            self._probe()
        except OSError as error:
            raise StorageFailed("the output folder cannot be used", detail=f"{self.root}: {error}") from error

    def look(self) -> None:
        """See `MediaStore.look`."""
        self.check_room()
        try:
            if self._failed or not os.access(self.root, os.W_OK | os.X_OK):
                make_folder(self.root)
                self._probe()
                self._failed = False
        except OSError as error:
            raise StorageFailed("the output folder cannot be written", detail=f"{self.root}: {error}") from error

    def _probe(self) -> None:
        """Raise `OSError` when no file can be made. A disk that is full is none of that: it will have room again."""
        probe = self.root / _PROBE
        try:
            self._write(probe, b"probe")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def check_room(self) -> None:
        """Raise `StorageFull` while the bytes that did not fit the last time still would not."""
        if self._wanted:
            try:
                free = shutil.disk_usage(self.root).free
            except OSError:  # the folder is gone: who stores will say so
                free = self._wanted
            if free < self._wanted:
                raise StorageFull("no room for finished media", detail=f"free some space in {self.root}")
            self._wanted = 0

    def path(self, name: str) -> Path:
        """Where a file of that name lies, or would."""
        return self.root / name

    def place(self, file: StoredFile) -> StoredFile:
        """See `MediaStore.place`: the folder may have been moved."""
        return replace(file, path=self.path(file.name))

    def find(self, name: str) -> StoredFile | None:
        """See `MediaStore.find`: the folder is this server's alone."""
        return None

    def store(self, request: RequestId, files: Sequence[tuple[MediaFile, bytes]]) -> tuple[StoredFile, ...]:
        """See `MediaStore.store`."""
        if not _REQUEST.fullmatch(request):
            raise StorageFailed(f"{request!r} is not a job id of this server", retryable=False)
        stored: list[StoredFile] = []
        try:
            for index, (file, data) in enumerate(files):
                name = request if len(files) == 1 else f"{request}-{index}"
                stored.append(self._store_one(name, file, data))
            self._keep_names()
        except BaseException:
            self.remove(stored)
            raise
        return tuple(stored)

    def remove(self, files: Iterable[StoredFile]) -> None:
        """Delete files of this store; raises `StorageFailed` for one that is there and cannot be deleted."""
        for file in files:
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                raise StorageFailed(f"{file.name} cannot be deleted", detail=str(error)) from error

    def _store_one(self, stem: str, file: MediaFile, data: bytes) -> StoredFile:
        if not _SUFFIX.fullmatch(file.suffix):
            problem = f"suffix={file.suffix!r}: must be a dot and up to 8 lower-case letters or digits"
            raise StorageFailed(problem, retryable=False)
        if xxhash.xxh3_64_intdigest(data) != file.checksum:
            raise StorageFailed(f"{stem}{file.suffix} was damaged on its way from the decoder: checksums differ")
        path = self.root / f"{stem}{file.suffix}"
        part = self.root / f".{path.name}{_PART}"
        try:
            self._write(part, data)
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if error.errno in NO_ROOM:
                self._wanted = len(data)
                raise StorageFull(f"no room for {path.name} ({len(data)} bytes)", detail=str(self.root)) from error
            self._failed = True
            raise StorageFailed(f"{path.name} cannot be written", detail=str(error)) from error
        return StoredFile(
            name=path.name,
            path=path,
            mime=file.mime,
            suffix=file.suffix,
            nbytes=len(data),
            width=file.width,
            height=file.height,
            frames=file.frames,
            fps=file.fps,
        )

    def _keep_names(self) -> None:
        """Have the names survive a power cut too, once for all files of a job."""
        try:
            sync_folder(self.root)
        except OSError as error:
            self._failed = True
            raise StorageFailed("the output folder cannot be written", detail=f"{self.root}: {error}") from error

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        with path.open("wb") as target:
            target.write(data)
            target.flush()
            # The decoder forgets its copy once we acknowledge, so the bytes must survive a power cut from here on.
            os.fsync(target.fileno())
