"""The journal on disk: rows of `triptych.core.journal` in SQLite, committed in groups by one thread.

Theory of operation. The loop never touches the database. It hands over acceptances, which it waits for, and notes,
which it does not. The writer takes all that has come, and commits it as one transaction that is on the disk when it
returns (WAL, synchronous=FULL); what arrives meanwhile is the next one. So one flush of the disk serves everybody who
waited for it. Notes of one request replace each other before they are written. Those that could not be written are
kept and tried again; an acceptance that could not be written is refused, and nothing of it stays. Nor is anything
written while the files are not those that were opened: whoever reads the folder next would not find it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from triptych.core.journal import (
    ENDED_SLOT,
    SLOTS,
    TRANSIENT_SLOT,
    Accepted,
    JournalEntry,
    displaced_by,
    request_of,
    slot_of,
)
from triptych.errors import ConfigError, StorageFailed, StorageFull, TriptychError
from triptych.ids import RequestId
from triptych.server.private import close_to_others, make_folder

log = logging.getLogger(__name__)

VERSION = 1
"""Layout of the rows; another one is refused."""
GATHER_SECONDS = 0.005
"""How long notes that nobody waits for are gathered."""
RETRY_SECONDS = 1.0
"""Between attempts to write notes that could not be written, and between looks whether the files are still there."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    request TEXT NOT NULL, slot INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (request, slot)
) WITHOUT ROWID
"""
_INSERT = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)"
_TRIM = f"DELETE FROM entries WHERE request = ? AND slot >= {TRANSIENT_SLOT}"
_DISPLACE = "DELETE FROM entries WHERE request = ? AND slot = ?"
_PURGE = "DELETE FROM entries WHERE request = ?"
_PROBE = f"PRAGMA user_version = {VERSION}"
"""Writes a page also when it changes nothing."""
_ORPHANS = "DELETE FROM entries WHERE request NOT IN (SELECT request FROM entries WHERE slot = 0)"

NAME = "journal.sqlite3"

_decoder = msgspec.msgpack.Decoder(JournalEntry)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class _Row:
    request: RequestId
    slot: int
    body: bytes
    displaced: int | None


@dataclass(frozen=True, slots=True)
class _Purge:
    request: RequestId


@dataclass(frozen=True, slots=True)
class _Wait:
    """Somebody waits until what came before, and ``row`` if there is one, is on the disk."""

    future: asyncio.Future[None]
    row: _Row | None


@dataclass(frozen=True, slots=True)
class _Close:
    pass


@dataclass(slots=True)
class _Notes:
    """Notes that are not written yet."""

    rows: dict[tuple[RequestId, int], _Row] = field(default_factory=dict[tuple[RequestId, int], _Row])
    displaced: dict[tuple[RequestId, int], None] = field(default_factory=dict[tuple[RequestId, int], None])
    trims: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    purges: dict[RequestId, None] = field(default_factory=dict[RequestId, None])

    def __bool__(self) -> bool:
        return bool(self.rows or self.displaced or self.trims or self.purges)

    def add(self, row: _Row) -> None:
        """Take a row, which replaces the one before it."""
        key = (row.request, row.slot)
        self.rows.pop(key, None)  # replaced at its new place, because order matters
        self.rows[key] = row
        if row.displaced is not None:
            self.rows.pop((row.request, row.displaced), None)
            self.displaced[row.request, row.displaced] = None
        if row.slot == ENDED_SLOT:
            self._drop(row.request, TRANSIENT_SLOT)
            self.trims[row.request] = None

    def purge(self, request: RequestId) -> None:
        """Delete everything about a request."""
        self._drop(request, SLOTS.start)
        self.trims.pop(request, None)
        self.purges[request] = None

    def _drop(self, request: RequestId, first: int) -> None:
        for slot in SLOTS[first:]:
            self.rows.pop((request, slot), None)


class Journal:
    """One database file, used by one server at a time. All methods belong to the loop's thread but `open`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # No SimpleQueue, which is waited on for a while: before Python 3.13 its get never ends when the timeout passes
        # before it begins to wait.
        self._inbox: queue.Queue[_Row | _Purge | _Wait | _Close] = queue.Queue()
        self.trouble: TriptychError | None = None
        """Why the journal cannot be written at the moment."""
        self._number = 0
        self._opened: dict[Path, tuple[int, int]] = {}
        """Device and inode of each file that must stay where it was."""
        self._database: sqlite3.Connection | None = None
        self._lock = -1
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> list[JournalEntry]:
        """Open or make the database and return its entries in the order in which they were written. Blocking.

        Raises `ConfigError` when another server uses the folder or wrote another layout, `StorageFailed` when the
        folder or the database cannot be used.
        """
        try:
            make_folder(self._folder)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # The files that SQLite makes beside it have its mode.
            os.close(os.open(self._folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            close_to_others(*(self._folder / name for name in ("lock", NAME, f"{NAME}-wal", f"{NAME}-shm")))
        except OSError as error:
            raise StorageFailed("the state folder cannot be used", detail=f"{self._folder}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--state-dir {self._folder} is in use by another server; give each its own") from error
        path = self._folder / NAME
        try:
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database = database
            entries = self._read(database, path)
            files = (self._folder / name for name in ("lock", NAME, f"{NAME}-wal"))
            self._opened = {file: _identity(file) for file in files if file.exists()}
            return entries
        except (OSError, sqlite3.Error, msgspec.MsgspecError) as error:
            raise StorageFailed("the journal cannot be read", detail=f"{path}: {error}") from error

    def _read(self, database: sqlite3.Connection, path: Path) -> list[JournalEntry]:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # needs no shared-memory file, which a full disk could tear
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise ConfigError(f"{path} has layout {version}; this server reads {VERSION}: give another --state-dir")
        database.execute(_SCHEMA)
        database.execute(_PROBE)
        database.execute(_ORPHANS)
        rows = database.execute("SELECT number, body FROM entries ORDER BY number").fetchall()
        self._number = rows[-1][0] + 1 if rows else 0
        return [_decoder.decode(body) for _, body in rows]

    def start(self) -> None:
        """Begin to write; call it on the loop after `open`."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="journal")
        self._thread.start()

    def close(self) -> None:
        """Write what was noted and close. Blocking. Idempotent."""
        if self._thread is not None:
            self._inbox.put(_Close())
            self._thread.join()
            self._thread = None
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- the loop's side -----------------------------------------------------------------------------------------

    async def accept(self, entry: Accepted) -> None:
        """Return once the entry is on the disk. Raises `StorageFull` or `StorageFailed`, and keeps nothing then."""
        await self._wait(_row(entry))

    def note(self, entry: JournalEntry) -> None:
        """Write an entry soon."""
        self._inbox.put(_row(entry))

    def purge(self, request: RequestId) -> None:
        """Delete all entries of a request soon."""
        self._inbox.put(_Purge(request))

    async def flush(self) -> None:
        """Return once all notes so far are on the disk. Raises as `accept` does; the notes are kept all the same."""
        await self._wait(None)

    async def _wait(self, row: _Row | None) -> None:
        assert self._loop is not None
        future: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put(_Wait(future, row))
        await future

    # -- the writer's side ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        notes = _Notes()
        going = True
        while going:
            waits, going = self._gather(notes)
            rows = [wait.row for wait in waits if wait.row is not None]
            error = self._write(notes, rows)
            if error is None:
                notes = _Notes()
            elif not going:
                log.error("the journal lost its last notes: %s", error)
            if waits:
                self._answer([wait.future for wait in waits], error)

    def _gather(self, notes: _Notes) -> tuple[list[_Wait], bool]:
        """Take what has come, and wait a while when there is nothing to do; False when it was the last."""
        waits: list[_Wait] = []
        try:
            item = self._inbox.get(timeout=RETRY_SECONDS)
        except queue.Empty:
            return waits, True
        gathered = False
        while True:
            match item:
                case _Row():
                    notes.add(item)
                case _Purge():
                    notes.purge(item.request)
                case _Wait():
                    waits.append(item)
                case _Close():
                    return waits, False
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                if waits or gathered:
                    return waits, True
                time.sleep(GATHER_SECONDS)
                gathered = True
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    return waits, True

    def _write(self, notes: _Notes, accepted: Sequence[_Row]) -> TriptychError | None:
        """Commit what there is. Also says whether that could be done, or could be if there were something."""
        before = self.trouble
        error = self._missing()
        if error is None and (notes or accepted or before is not None):
            error = self._commit(notes, accepted)
        self.trouble = error
        if error is not None and (before is None or str(before) != str(error)):
            log.error("%s", error)
        elif error is None and before is not None:
            log.info("the journal in %s can be written again", self._folder)
        return error

    def _missing(self) -> StorageFailed | None:
        """That the files are not where they were: a new server would not find in them what is written now."""
        for path, identity in self._opened.items():
            try:
                if _identity(path) == identity:
                    continue
                what = f"{path} is another file than the one that was opened"
            except OSError as error:
                what = str(error)
            return StorageFailed(
                "the state folder was taken away or replaced",
                detail=f"{what}; put it back, or start the server anew",
            )
        return None

    def _commit(self, notes: _Notes, accepted: Sequence[_Row]) -> TriptychError | None:
        database, number = self._database, self._number
        assert database is not None
        rows = [*accepted, *notes.rows.values()]
        try:
            database.execute("BEGIN IMMEDIATE")
            database.executemany(_PURGE, [(request,) for request in notes.purges])
            database.executemany(_DISPLACE, list(notes.displaced))
            database.executemany(_TRIM, [(request,) for request in notes.trims])
            if self.trouble is not None:
                database.execute(_PROBE)
            database.executemany(_INSERT, [(r.request, r.slot, number + i, r.body) for i, r in enumerate(rows)])
            database.execute("COMMIT")
        except sqlite3.Error as error:
            if database.in_transaction:
                database.rollback()
            return self._explain(error)
        self._number = number + len(rows)
        return None

    def _explain(self, error: sqlite3.Error) -> TriptychError:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return StorageFull("no room for the journal", detail=f"free some space in {self._folder}")
        return StorageFailed("the journal cannot be written", detail=f"{self._folder}: {error}")

    def _answer(self, futures: Sequence[asyncio.Future[None]], error: TriptychError | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_settle, futures, error)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _row(entry: JournalEntry) -> _Row:
    return _Row(request_of(entry), slot_of(entry), _encoder.encode(entry), displaced_by(entry))


def _settle(futures: Iterable[asyncio.Future[None]], error: TriptychError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
