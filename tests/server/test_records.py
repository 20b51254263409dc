"""Records: bounded memory, stable pages, and the latest state for whoever watches."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from triptych.core.events import JobState, JobView
from triptych.errors import BadRequest, NotFound
from triptych.ids import RequestId
from triptych.server.records import Entry, IdMint, OutputKind, Records


def view(request: RequestId, state: JobState, step: int = 0) -> JobView:
    return JobView(
        request=request,
        state=state,
        attempt=1,
        step=step,
        steps=4,
        position=None,
        waiting_seconds=0.0,
        running_seconds=0.0,
        error=None,
        timings=(),
    )


class Book:
    """Records with a mint, and what was dropped for room."""

    def __init__(self, retained: int = 100) -> None:
        self.dropped: list[RequestId] = []
        self.records = Records(retained, lambda entry: self.dropped.append(entry.id))
        self.mint = IdMint()

    def add(self, output: OutputKind = "video") -> Entry:
        return self.take(self.mint(output), output)

    def take(self, request: RequestId, output: OutputKind, **metadata: str) -> Entry:
        entry = Entry(request, output, {"prompt": "a tree"}, metadata, view(request, JobState.PENDING))
        self.records.add(entry)
        return entry

    def move(self, entry: Entry, state: JobState, step: int = 0) -> None:
        self.records.update(entry, view(entry.id, state, step))


def test_ids_sort_by_age_and_are_told_apart_from_other_strings() -> None:
    mint = IdMint()
    ids = [mint("video") for _ in range(1000)]
    assert ids == sorted(set(ids))
    assert IdMint.is_id(ids[0], "video")
    assert not IdMint.is_id(ids[0], "image")
    assert not IdMint.is_id("video_1", "video")
    assert not IdMint.is_id(ids[0][:-1] + "/", "video")


def test_times_are_stamped_once_each() -> None:
    book = Book()
    entry = book.add()
    assert entry.record().started_at is None
    book.move(entry, JobState.ENCODER_RUNNING)
    started = entry.record().started_at
    assert started is not None
    assert started >= entry.created_at
    book.move(entry, JobState.DENOISING_RUNNING)
    assert entry.record().started_at == started
    book.move(entry, JobState.DONE)
    completed = entry.record().completed_at
    assert completed is not None
    book.move(entry, JobState.FAILED)
    assert entry.record().view.state is JobState.DONE
    assert entry.record().completed_at == completed


def test_the_oldest_ended_job_goes_first_and_live_ones_never() -> None:
    book = Book(retained=2)
    live = book.add()
    ended = [book.add() for _ in range(4)]
    for entry in reversed(ended):
        book.move(entry, JobState.DONE)
    assert book.dropped == [ended[3].id, ended[2].id]
    assert book.records.get(live.id) is live
    assert book.records.get(ended[0].id) is ended[0]
    with pytest.raises(NotFound, match=ended[3].id):
        book.records.get(ended[3].id)
    assert len(book.records) == 3


def test_states_are_counted() -> None:
    book = Book()
    first, second = book.add(), book.add()
    book.move(first, JobState.ENCODER_WAITING)
    assert book.records.states[JobState.PENDING] == 1
    assert book.records.states[JobState.ENCODER_WAITING] == 1
    book.records.remove(first)
    book.move(second, JobState.DONE)
    assert {s: n for s, n in book.records.states.items() if n} == {JobState.DONE: 1}


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize(
    "arrival", [(0, 1, 2, 3, 4, 5, 6), (4, 1, 6, 0, 2, 5, 3)], ids=["as made", "as after a restart"]
)
def test_pages_follow_each_other_without_gap_or_repeat(order: Literal["asc", "desc"], arrival: tuple[int, ...]) -> None:
    book = Book()
    videos = [book.mint("video") for _ in arrival]
    for number in arrival:
        book.take(videos[number], "video")
        book.add("image")
    expected = videos if order == "asc" else videos[::-1]
    seen: list[RequestId] = []
    after, more = None, True
    while more:
        page, more = book.records.page(output="video", after=after, limit=3, order=order)
        seen += [record.id for record in page]
        after = page[-1].id
    assert seen == expected


def test_a_page_that_ends_exactly_at_the_end_says_there_is_no_more() -> None:
    book = Book()
    for _ in range(3):
        book.add()
    page, more = book.records.page(output="video", after=None, limit=3, order="desc")
    assert (len(page), more) == (3, False)


def test_a_cursor_stays_good_when_its_job_is_deleted() -> None:
    book = Book()
    entries = [book.add() for _ in range(3)]
    book.records.remove(entries[1])
    page, more = book.records.page(output="video", after=entries[1].id, limit=5, order="asc")
    assert [record.id for record in page] == [entries[2].id]
    assert not more


def test_a_cursor_that_is_no_id_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="after='nonsense'") as caught:
        Book().records.page(output="video", after=RequestId("nonsense"), limit=5, order="asc")
    assert caught.value.field == "after"


async def test_a_watcher_wakes_at_any_change_and_a_waiter_at_the_end() -> None:
    book = Book()
    entry = book.add()
    loop = asyncio.get_running_loop()
    watcher, waiter = loop.create_future(), loop.create_future()
    entry.watchers.append(watcher)
    entry.waiters.append(waiter)
    book.move(entry, JobState.DENOISING_RUNNING, step=1)
    assert watcher.done()
    assert not waiter.done()
    assert entry.watchers == []
    book.move(entry, JobState.CANCELLED)
    assert waiter.done()


def test_jobs_are_found_by_the_name_that_their_client_gave_them() -> None:
    book = Book(retained=1)
    ids = [book.mint(output) for output in ("video", "image", "video")]
    old, middle, new = (book.take(id, id[:5], task_id="mine") for id in (ids[1], ids[0], ids[2]))  # type: ignore[arg-type]
    assert [entry.id for entry in book.records.having("task_id", "mine")] == ids
    assert book.records.having("task_id", "") == book.records.having("save_result_path", "mine") == []
    book.records.remove(new)
    assert book.records.having("task_id", "mine") == [middle, old]
    for entry in (old, middle):  # of which one is kept
        book.move(entry, JobState.FAILED)
    assert book.records.having("task_id", "mine") == [middle]
    book.records.remove(middle)
    assert book.records.having("task_id", "mine") == []
