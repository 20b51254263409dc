"""The journal on disk: what was waited for is there after a kill, a full disk refuses and loses nothing."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, precondition, rule

from tests.core.test_journal import ACCEPTED, FILE, granted, staged, view
from tests.server.disk import on_disk, told
from tests.server.house import until
from triptych.core.events import Clocks, JobState, LeaseGranted
from triptych.core.journal import Accepted, Deleting, Finish, JournalEntry, Paused, Saved, Stored, replay, request_of
from triptych.errors import ConfigError, StorageFailed, StorageFull
from triptych.ids import RequestId, Role
from triptych.server.journal import VERSION, Journal
from triptych.wire.messages import Lease, replace

T = TypeVar("T")


def accepted(name: str, **params: Any) -> Accepted:
    return replace(ACCEPTED, request=RequestId(name), params=params)


@pytest.fixture
async def journal(tmp_path: Path) -> Any:
    journal = Journal(tmp_path / "state")
    assert journal.open() == []
    journal.start()
    yield journal
    await asyncio.to_thread(journal.close)


async def test_an_accepted_request_is_on_the_disk_when_accept_returns(journal: Journal, tmp_path: Path) -> None:
    await journal.accept(accepted("a", prompt="x"))
    assert list(on_disk(tmp_path / "state")) == ["a"]


async def test_many_that_are_accepted_at_once_share_few_commits(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []
    original = Journal._commit

    def commit(self: Journal, notes: Any, rows: Any) -> Any:
        commits.append(len(rows))
        return original(self, notes, rows)

    monkeypatch.setattr(Journal, "_commit", commit)
    await asyncio.gather(*(journal.accept(accepted(f"r{i}")) for i in range(200)))
    assert sum(commits) == 200
    assert len(commits) < 50


async def test_an_ended_request_leaves_no_leases_behind(journal: Journal, tmp_path: Path) -> None:
    entry = replace(ACCEPTED, request=RequestId("video_1"))
    await journal.accept(entry)
    for note in (granted(Role.ENCODER), staged(Role.ENCODER), granted(Role.DENOISER)):
        journal.note(note)
    await journal.flush()
    journal.note(Finish(view=view(JobState.FAILED), started_at=1.0, completed_at=2.0))
    await journal.flush()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / "journal.sqlite3") as database:
        assert database.execute("SELECT slot FROM entries").fetchall() == [(0,), (2,)]
    database.close()


async def test_a_full_disk_refuses_with_507_and_keeps_nothing_of_it(journal: Journal, tmp_path: Path) -> None:
    await journal.accept(accepted("before"))
    limit_pages(journal, 0)
    with pytest.raises(StorageFull, match="state") as caught:
        await journal.accept(accepted("big", prompt="x" * 100_000))
    assert caught.value.status == 507
    assert list(on_disk(tmp_path / "state")) == ["before"]
    limit_pages(journal, 1000)
    await journal.accept(accepted("after"))
    assert list(on_disk(tmp_path / "state")) == ["before", "after"]


async def test_notes_that_found_no_room_are_written_once_there_is_some(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.server.journal.RETRY_SECONDS", 0.05)
    entry = replace(ACCEPTED, request=RequestId("video_1"))
    await journal.accept(entry)
    limit_pages(journal, 0)
    files = tuple(replace(FILE, name=f"{i}.mp4") for i in range(2000))
    journal.note(Stored(request=entry.request, files=files, stored_at=5.0))
    with pytest.raises(StorageFull):
        await journal.flush()
    limit_pages(journal, 10_000)
    await journal.flush()
    finish, stored, *_ = on_disk(tmp_path / "state")[entry.request]
    assert finish.view.state is JobState.DONE
    assert len(stored.files) == 2000


async def test_a_folder_that_was_taken_away_takes_nothing_until_it_is_back(journal: Journal, tmp_path: Path) -> None:
    """Symptom: jobs were accepted into files that nobody would ever find."""
    state, aside = tmp_path / "state", tmp_path / "aside"
    await journal.accept(accepted("before"))
    state.rename(aside)
    await until(lambda: journal.trouble, "the loss to be noticed while nobody writes")
    state.mkdir()
    other = Journal(state)
    assert other.open() == [], "another server can begin there"
    with pytest.raises(StorageFailed, match="taken away or replaced"):
        await journal.accept(accepted("lost"))
    journal.note(
        Finish(view=replace(view(JobState.FAILED), request=RequestId("before")), started_at=1.0, completed_at=2.0)
    )
    with pytest.raises(StorageFailed, match="another file than the one that was opened"):
        await journal.flush()
    other.close()
    shutil.rmtree(state)
    aside.rename(state)
    await journal.accept(accepted("after"))
    assert journal.trouble is None
    found = on_disk(state)
    assert list(found) == ["before", "after"]
    assert found[RequestId("before")][0].view.state is JobState.FAILED, "what was noted meanwhile is kept"


@pytest.mark.parametrize("name", ["lock", "journal.sqlite3", "journal.sqlite3-wal"])
async def test_each_file_of_the_journal_is_missed(journal: Journal, tmp_path: Path, name: str) -> None:
    (tmp_path / "state" / name).unlink()
    with pytest.raises(StorageFailed, match=name):
        await journal.accept(accepted("lost"))


def limit_pages(journal: Journal, more: int) -> None:
    """Let the database grow by so many pages and no further: SQLite's own full disk."""
    database = journal._database
    assert database is not None
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages + more}")


def test_two_servers_cannot_use_one_folder(tmp_path: Path) -> None:
    first, second = Journal(tmp_path), Journal(tmp_path)
    first.open()
    with pytest.raises(ConfigError, match=r"--state-dir .* is in use by another server"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_layout_of_another_version_is_refused(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "journal.sqlite3")
    database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match=f"layout {VERSION + 1}"):
        journal.open()
    journal.close()


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite3").write_bytes(b"not a database" * 1000)
    journal = Journal(tmp_path)
    with pytest.raises(StorageFailed, match=r"journal\.sqlite3"):
        journal.open()
    journal.close()


@dataclass(frozen=True)
class Purge:
    """All that was noted of a request is to go."""

    request: RequestId


def left(written: Iterable[JournalEntry | Purge]) -> dict[RequestId, Any]:
    """What a server would do with each request once all of this is on the disk."""
    entries: list[JournalEntry] = []
    for note in written:
        if isinstance(note, Purge):
            entries = [entry for entry in entries if request_of(entry) != note.request]
        else:
            entries.append(note)
    return told(replay(entries))


def dawdle(statement: str) -> None:
    """A disk that takes its time, so that a kill finds something under way."""
    if statement == "COMMIT":
        time.sleep(0.005)


class JournalMachine(RuleBasedStateMachine):
    """Random lives of requests against a plain list of what was written."""

    requests: Bundle[RequestId] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name) / "state"
        self.written: list[JournalEntry | Purge] = []
        self.durable = 0
        """So many of ``written`` no kill may take."""
        self.counter = 0
        self.deaths = 0
        assert self.open() == {}

    def open(self) -> dict[RequestId, Any]:
        self.journal = Journal(self.folder)
        found = told(replay(self.journal.open()))
        database = self.journal._database
        assert database is not None
        database.set_trace_callback(dawdle)
        self.runner.run(self._start())
        return found

    async def _start(self) -> None:
        self.journal.start()

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.runner.run(wait())

    def note(self, entry: JournalEntry) -> None:
        self.journal.note(entry)
        self.written.append(entry)

    def attempt(self, request: RequestId) -> int:
        """The latest attempt of a request that runs, 0 before the first, -1 once it has ended."""
        notes = [note for note in self.written if not isinstance(note, Purge) and request_of(note) == request]
        if any(isinstance(note, Finish) for note in notes):
            return -1
        return max((note.lease.attempt for note in notes if isinstance(note, LeaseGranted)), default=0)

    @rule(target=requests)
    def accept(self) -> RequestId:
        self.counter += 1
        entry = accepted(f"r{self.counter:04}")
        self.run(self.journal.accept(entry))
        self.written.append(entry)
        self.durable = len(self.written)
        return entry.request

    @rule(request=requests, role=st.sampled_from(Role))
    def grant(self, request: RequestId, role: Role) -> None:
        if (attempt := self.attempt(request)) >= 0:
            self.note(replace(granted(role), lease=Lease(request, role, attempt + 1)))

    @rule(request=requests, role=st.sampled_from((Role.ENCODER, Role.DENOISER)))
    def stage(self, request: RequestId, role: Role) -> None:
        if (attempt := self.attempt(request)) > 0:
            self.note(replace(staged(role), lease=Lease(request, role, attempt)))

    @rule(request=requests, seconds=st.integers(0, 99))
    def tell_time(self, request: RequestId, seconds: int) -> None:
        if self.attempt(request) >= 0:
            self.note(Clocks(request=request, waited=1.0, ran=float(seconds)))

    @rule(request=requests, paused=st.booleans())
    def pause(self, request: RequestId, paused: bool) -> None:
        if self.attempt(request) >= 0:
            self.note(Paused(request=request, paused=paused))

    @rule(request=requests)
    def save(self, request: RequestId) -> None:
        if self.attempt(request) < 0:
            self.note(Saved(request=request))

    @rule(request=requests)
    def begin_to_delete(self, request: RequestId) -> None:
        self.note(Deleting(request=request))

    @rule(request=requests)
    def store(self, request: RequestId) -> None:
        if self.attempt(request) >= 0:
            self.note(Stored(request=request, files=(FILE,), stored_at=7.0))

    @rule(request=requests, state=st.sampled_from((JobState.DONE, JobState.FAILED, JobState.CANCELLED)))
    def finish(self, request: RequestId, state: JobState) -> None:
        if self.attempt(request) >= 0:
            ended = replace(view(state), request=request)
            self.note(Finish(view=ended, started_at=1.0, completed_at=2.0))

    @rule(request=consumes(requests))
    def purge(self, request: RequestId) -> None:
        self.journal.purge(request)
        self.written.append(Purge(request))

    @precondition(lambda self: self.written)
    @rule()
    def flush(self) -> None:
        self.run(self.journal.flush())
        self.durable = len(self.written)
        assert on_disk(self.folder) == left(self.written)

    @rule()
    def be_killed(self) -> None:
        """The next server finds all that was waited for, and of the rest as much as was written before the kill."""
        self.deaths += 1
        killed, self.folder = self.folder, Path(self.place.name) / f"state after {self.deaths}"
        # Nothing is moved out of a write-ahead log as short as this one while it is used: a copy is that of one moment.
        shutil.copytree(killed, self.folder)
        self.journal.close()
        found = self.open()
        lengths = range(len(self.written), self.durable - 1, -1)
        kept = next((length for length in lengths if left(self.written[:length]) == found), None)
        assert kept is not None, (found, self.written[: self.durable], self.written[self.durable :])
        del self.written[kept:]
        self.durable = kept

    @rule()
    def restart(self) -> None:
        self.journal.close()
        assert self.open() == left(self.written)
        self.durable = len(self.written)

    def teardown(self) -> None:
        self.journal.close()
        assert on_disk(self.folder) == left(self.written)
        self.runner.close()
        self.place.cleanup()


JournalMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)
TestJournalMachine = JournalMachine.TestCase
