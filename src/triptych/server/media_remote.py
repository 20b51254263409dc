"""Finished media in any store that fsspec reaches (S3, GCS, Azure, SFTP), with the latest ones on local disk."""

from __future__ import annotations

import importlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from triptych.config import MIB
from triptych.config.secrets import without_secrets
from triptych.errors import ConfigError, StorageFailed
from triptych.ids import RequestId
from triptych.server.media_store import STORE_NAME, LocalMedia
from triptych.server.records import StoredFile
from triptych.wire.messages import MediaFile

log = logging.getLogger(__name__)

CACHE_BYTES = 1024 * MIB
"""Local copies that are kept to be served; the longest unused goes first."""

_AT_ONCE: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols of stores where a file appears when all of it has arrived, so that others never see half of one."""
_MIME: Final = {".mp4": "video/mp4", ".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}

T = TypeVar("T")


class RemoteMedia:
    """Blocking, and safe to call from several threads. Credentials and endpoints come from where the store's own tools
    read them (for S3: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` and their like).

    A job's files are known to nobody before all of them are in the store as a whole.
    """

    def __init__(self, url: str, cache: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._url = url.rstrip("/")
        self._local = LocalMedia(cache)
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[str, int] = OrderedDict()
        """File name to its size, the latest used last."""
        self._lock = threading.Lock()
        self._failed = False
        """Whether the last file could not be brought to the store."""
        self._system: Any = None
        self._root = ""

    def open(self) -> None:
        """Reach the store and try that it can be written. Raises `ConfigError` or `StorageFailed`."""
        self._local.open()
        self._find_copies()
        try:
            fsspec: Any = importlib.import_module("fsspec")
            self._system, self._root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"--media-store {without_secrets(self._url)}: {without_secrets(str(error), self._url)}; "
                "stores need extra packages, e.g. pip install 'triptych[s3]'"
            ) from None
        self._probe()

    def look(self) -> None:
        """See `MediaStore.look`. The store itself is asked only after a failure: every question costs."""
        self._local.look()
        if self._failed:
            self._probe()
            self._failed = False

    def _probe(self) -> None:
        probe = f"{self._root}/.triptych-probe"
        self._remotely("cannot be written", lambda: self._system.makedirs(self._root, exist_ok=True))
        self._remotely("cannot be written", lambda: self._system.pipe_file(probe, b"probe"))
        self._remotely("cannot be deleted from", lambda: self._system.rm_file(probe))

    def _find_copies(self) -> None:
        """Take the local copies of earlier lives into the books, of other servers' files and of forgotten jobs too."""
        copies = [path for path in self._local.root.iterdir() if STORE_NAME.fullmatch(path.name) and path.is_file()]
        sizes = {path: path.stat() for path in copies}
        for path in sorted(copies, key=lambda path: sizes[path].st_atime):
            self._keep(path.name, sizes[path].st_size)

    def check_room(self) -> None:
        """Raise `StorageFull` while what did not fit on the local disk still would not; remote room is not known."""
        self._local.check_room()

    def place(self, file: StoredFile) -> StoredFile:
        """See `MediaStore.place`."""
        placed = replace(self._local.place(file), source=self)
        if placed.path.exists():
            self._keep(placed.name, placed.nbytes)
        return placed

    def store(self, request: RequestId, files: Sequence[tuple[MediaFile, bytes]]) -> tuple[StoredFile, ...]:
        """See `MediaStore.store`."""
        stored = self._local.store(request, files)
        try:
            for file in stored:
                self._upload(file)
        except BaseException:
            self._failed = True
            self._local.remove(stored)
            for file in stored:
                with suppress(StorageFailed):
                    self._delete(file.name)
            raise
        return tuple(self.place(file) for file in stored)

    def find(self, name: str) -> StoredFile | None:
        """See `MediaStore.find`. Of stores that show files before they are whole nothing is given."""
        path, remote = self._local.path(name), self._remote(name)
        if path.suffix not in _MIME or self._url.partition("://")[0] not in _AT_ONCE:
            return None
        self._system.invalidate_cache(self._root)  # others write and delete there too
        try:
            size = self._remotely("cannot be read", lambda: self._system.info(remote)["size"], absent_is_news=True)
        except FileNotFoundError:
            self._drop(name)
            return None
        return StoredFile(
            name=name,
            path=path,
            mime=_MIME[path.suffix],
            suffix=path.suffix,
            nbytes=size,
            width=0,
            height=0,
            frames=0,
            fps=0,
            source=self,
        )

    def has(self, name: str) -> bool:
        """See `Source.has`."""
        try:
            nbytes = self._local.path(name).stat().st_size
        except FileNotFoundError:
            return False
        self._keep(name, nbytes)
        return True

    def fetch(self, name: str) -> None:
        """Have the file of that name on the local disk. Raises `FileNotFoundError` or `StorageFailed`."""
        path = self._local.path(name)
        if not path.exists():
            part = path.with_name(f".{name}.{threading.get_ident()}.part")
            try:
                self._remotely(
                    "cannot be read", lambda: self._system.get_file(self._remote(name), str(part)), absent_is_news=True
                )
                part.replace(path)
            finally:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
        self._keep(name, path.stat().st_size)

    def remove(self, files: Iterable[StoredFile]) -> None:
        """See `MediaStore.remove`."""
        gone = tuple(files)
        for file in gone:
            self._delete(file.name)
        self._local.remove(gone)
        with self._lock:
            for file in gone:
                self._cached.pop(file.name, None)

    def _upload(self, file: StoredFile) -> None:
        remote = self._remote(file.name)
        self._remotely("cannot be written", lambda: self._system.put_file(str(file.path), remote))
        size = self._remotely("cannot be read", lambda: self._system.info(remote)["size"])
        if size != file.nbytes:
            raise StorageFailed(f"{file.name} has {size} bytes after {file.nbytes} were written to the media store")

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            remote = self._remote(name)
            self._remotely("cannot be deleted from", lambda: self._system.rm_file(remote), absent_is_news=True)

    def _keep(self, name: str, nbytes: int) -> None:
        """Note a use, and drop the local copies for which there is no room."""
        with self._lock:
            self._cached.pop(name, None)
            self._cached[name] = nbytes
            while sum(self._cached.values()) > self._cache_bytes and len(self._cached) > 1:
                oldest, _ = self._cached.popitem(last=False)
                with suppress(OSError):
                    self._local.path(oldest).unlink(missing_ok=True)

    def _drop(self, name: str) -> None:
        """Have no local copy of a file that is gone from the store."""
        with self._lock:
            self._cached.pop(name, None)
            with suppress(OSError):
                self._local.path(name).unlink(missing_ok=True)

    def _remote(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _remotely(self, what: str, call: Callable[[], T], *, absent_is_news: bool = False) -> T:
        try:
            return call()
        except Exception as error:  # each store has errors of its own; all of them fail the one request at hand
            if absent_is_news and isinstance(error, FileNotFoundError):
                raise
            said = without_secrets(str(error), self._url)
            # Tracebacks show causes in their own words.
            cause = error if said == str(error) else None
            raise StorageFailed(f"the media store {what}", detail=f"{without_secrets(self._url)}: {said}") from cause
