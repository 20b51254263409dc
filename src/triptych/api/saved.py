"""Finished files at the paths that clients asked for, beside the store and always under the output folder."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Final

from anyio import to_thread

from triptych.api.references import contained
from triptych.errors import BadRequest, NotFound, NotReady
from triptych.ids import RequestId
from triptych.server.records import JobRecord, StoredFile
from triptych.server.service import DiffusionService

log = logging.getLogger(__name__)

REMEMBERED: Final = 10_000
KEY: Final = "save_result_path"
"""Where a job's metadata has the path that it was asked for."""

_STORE_NAME = re.compile(r"(?:video|image)_[0-9a-f]{32}.*", re.IGNORECASE)


class Saved:
    """Links each finished file to its path once, so that no bytes are stored twice; a later job replaces an earlier.

    The file at a path stays when its job is forgotten: who asks for a path wants to keep what is there.
    """

    def __init__(self, service: DiffusionService, root: Path, state: Path | None) -> None:
        self._service = service
        self._root = root
        self._state = state
        """The server's own records, which may lie in ``root`` and are nobody's to write."""
        self._jobs: OrderedDict[str, RequestId] = OrderedDict()
        """Path to the job that was last asked to save there."""
        self._done: OrderedDict[RequestId, str] = OrderedDict()
        """Job to what went wrong; empty when it went well."""
        self._followers: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def check(self, path: str) -> None:
        """Raise `BadRequest` for a path that cannot be written. Blocking."""
        if _STORE_NAME.fullmatch(path):
            raise BadRequest(KEY, f"{KEY}={path[:60]!r}: names of that form are the server's own")
        target = contained(self._root, KEY, path)
        if self._state is not None and target.is_relative_to(self._state.resolve()):
            raise BadRequest(KEY, f"{KEY}={path[:60]!r}: lies where the server keeps its own records")
        if target.is_dir() or any(parent.is_file() for parent in target.parents):
            raise BadRequest(KEY, f"{KEY}={path[:60]!r}: a folder or file stands in its way")

    def follow(self, record: JobRecord) -> None:
        """Save the file of a job as soon as it is there."""
        path = record.metadata.get(KEY)
        if not path:
            return
        self._jobs.pop(path, None)
        self._jobs[path] = record.id
        while len(self._jobs) > REMEMBERED:
            self._jobs.popitem(last=False)
        task = asyncio.ensure_future(self._follow(record.id))
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    def find(self, path: str) -> StoredFile | None:
        """The file that was saved at ``path``, read from the store; None when no job saved one there."""
        job = self._jobs.get(path)
        if job is None:
            return None
        try:
            record = self._service.get(job)
        except NotFound:
            return None
        return record.files[0] if record.files else None

    async def ensure(self, record: JobRecord) -> str:
        """Save the file of an ended job unless that was done; returns what went wrong, or nothing."""
        path = record.metadata.get(KEY)
        if not path or not record.files:
            return ""
        async with self._turn:
            problem = self._done.get(record.id)
            if problem is None:
                try:
                    await to_thread.run_sync(self._save, record.files[0], path)
                    problem = ""
                except (OSError, BadRequest) as error:
                    problem = f"the file could not be saved at {path}: {error}"
                    log.error("%s: %s", record.id, problem)
                self._done[record.id] = problem
                while len(self._done) > REMEMBERED:
                    self._done.popitem(last=False)
        return problem

    def _save(self, file: StoredFile, path: str) -> None:
        target = contained(self._root, KEY, path)
        if not target.suffix:
            target = target.with_name(target.name + file.suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{file.name}.part")
        part.unlink(missing_ok=True)
        try:
            os.link(file.fetch(), part)
        except OSError:  # a file system without links, or another one
            shutil.copyfile(file.path, part)
        part.replace(target)

    async def _follow(self, job: RequestId) -> None:
        try:
            await self.ensure(await self._service.wait(job))
        except (NotFound, NotReady):
            return  # deleted, or the server stops
