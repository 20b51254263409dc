"""Finished files at the paths that clients asked for, beside the store and always under the output folder."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from triptych.core.events import JobState
from triptych.core.journal import Saved
from triptych.errors import BadRequest
from triptych.ids import RequestId
from triptych.server.paths import contained
from triptych.server.records import SAVE_PATH, Entry, Records, StoredFile

log = logging.getLogger(__name__)

_STORE_NAME = re.compile(r"(?:video|image)_[0-9a-f]{32}.*", re.IGNORECASE)
_NUMBERED: Final = re.compile(r"(.*[^/])-([1-9][0-9]{0,2})(\.[^./]+)", re.DOTALL)


class SavedFiles:
    """Links each finished file to its path once, so that no bytes are stored twice.

    The first file of a job lies at the path itself, those behind it at ``name-1.png``, ``name-2.png`` and so on. Of
    jobs with one path the last accepted that came to files has it, in whatever order they end. What lies at a path
    stays when its job is forgotten: who asks for a path wants to keep what is there.
    """

    def __init__(
        self,
        records: Records,
        root: Path,
        state: Path | None,
        note: Callable[[Saved], None],
        fetch: Callable[[StoredFile], Awaitable[Path]],
    ) -> None:
        self._records = records
        self._root = root
        self._state = state
        """The server's own records, which may lie in ``root`` and are nobody's to write."""
        self._note = note
        self._fetch = fetch
        self._turn = asyncio.Lock()

    def check(self, path: str) -> None:
        """Raise `BadRequest` for a path that cannot be written. Blocking."""
        if _STORE_NAME.fullmatch(path):
            raise BadRequest(SAVE_PATH, f"{SAVE_PATH}={path[:60]!r}: names of that form are the server's own")
        target = contained(self._root, SAVE_PATH, path)
        if self._state is not None and target.is_relative_to(self._state.resolve()):
            raise BadRequest(SAVE_PATH, f"{SAVE_PATH}={path[:60]!r}: lies where the server keeps its own records")
        if target.is_dir() or any(parent.is_file() for parent in target.parents):
            raise BadRequest(SAVE_PATH, f"{SAVE_PATH}={path[:60]!r}: a folder or file stands in its way")

    def due(self, entry: Entry) -> bool:
        """Whether files of this job are to be saved and that was not tried yet."""
        return entry.saved is None and bool(entry.metadata.get(SAVE_PATH)) and _made(entry)

    async def ensure(self, job: RequestId) -> str:
        """Save the files of a job that is done unless that was tried; returns what went wrong, or nothing.

        A path that cannot be written stays wrong until the next life of the server. Raises `StorageFailed` while the
        store cannot be read, and then the next call tries again.
        """
        entry = self._records.find(job)
        if entry is None:
            return ""
        if not self.due(entry):
            return entry.saved or ""
        with suppress(OSError):  # saving it says so
            for file in entry.files:
                await self._fetch(file)  # before its turn: a store that hangs holds up nobody else's files
        async with self._turn:
            if entry.saved is None:
                entry.saved = await self._save(entry)
                if not entry.saved and self._records.find(job) is entry:
                    self._note(Saved(request=job))
        return entry.saved

    def find(self, path: str) -> StoredFile | None:
        """The file that was saved at ``path``, as the store has it; None when no job that is remembered saved one."""
        places = [(path, 0)]
        if numbered := _NUMBERED.fullmatch(path):
            places.append((numbered[1] + numbered[3], int(numbered[2])))
        for name, index in places:
            made = [entry for entry in self._records.having(SAVE_PATH, name) if _made(entry)]
            if made and index < len(made[-1].files):
                return made[-1].files[index]
        return None

    async def _save(self, entry: Entry) -> str:
        path = entry.metadata[SAVE_PATH]
        for index, file in enumerate(entry.files):
            place = place_of(path, index)
            if any(later.id > entry.id and _made(later) for later in self._records.having(SAVE_PATH, place)):
                continue
            try:
                await asyncio.to_thread(self._link, file, place)
            except (OSError, BadRequest) as error:
                # Not the error's own text: it holds paths, which are the operator's business.
                why = error.strerror if isinstance(error, OSError) else error.message
                log.error("%s: the file could not be saved at %s: %s", entry.id, place, error)
                return f"the file could not be saved at {place}: {why}"
        return ""

    def _link(self, file: StoredFile, path: str) -> None:
        target = contained(self._root, SAVE_PATH, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{file.name}.part")
        part.unlink(missing_ok=True)
        try:
            os.link(file.fetch(), part)
        except OSError:  # a file system without links, or another one
            shutil.copyfile(file.path, part)
        part.replace(target)
        part.unlink(missing_ok=True)  # still there where the target was a link to the same file already


def place_of(path: str, index: int) -> str:
    """Where the file ``index`` of a job lies that was asked to save at ``path``."""
    pure = PurePosixPath(path)
    return path if index == 0 else str(pure.with_name(f"{pure.stem}-{index}{pure.suffix}"))


def _made(entry: Entry) -> bool:
    return entry.view.state is JobState.DONE and bool(entry.files)
