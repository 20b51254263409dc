"""Media of deleted jobs go, if not at once then when their store is back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.house import until
from tests.server.test_recovery import Estate
from triptych.errors import StorageFailed
from triptych.ids import RequestId
from triptych.server.disposal import LONGEST_PAUSE, Disposal
from triptych.server.media_store import LocalMedia
from triptych.server.records import StoredFile


@pytest.fixture
async def estate(tmp_path: Path) -> AsyncIterator[Estate]:
    estate = Estate(tmp_path)
    await estate.open()
    yield estate
    await estate.close()


def media(name: str) -> tuple[StoredFile, ...]:
    return (
        StoredFile(
            name=name, path=Path(name), mime="video/mp4", suffix=".mp4", nbytes=4, width=8, height=8, frames=1, fps=8.0
        ),
    )


class Store:
    """Deletes what it is asked to, unless it is down or the file is stuck."""

    def __init__(self) -> None:
        self.now = 100.0
        self.down = False
        self.stuck: set[str] = set()
        self.deleted: list[str] = []
        self.forgotten: list[RequestId] = []
        self.tries = 0
        self.disposal = Disposal(self._remove, self._forget, lambda: self.now)

    async def _remove(self, files: tuple[StoredFile, ...]) -> None:
        self.tries += 1
        for file in files:
            if self.down or file.name in self.stuck:
                raise StorageFailed(f"{file.name} cannot be deleted")
            self.deleted.append(file.name)

    async def _forget(self, request: RequestId) -> None:
        self.forgotten.append(request)

    async def clear(self, name: str, *, rows: bool = True) -> None:
        await self.disposal.clear(RequestId(name), media(name), rows=rows)

    async def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            if self.disposal.due:
                await self.disposal.retry()


async def test_rows_go_after_the_media_and_not_before() -> None:
    store = Store()
    await store.clear("a")
    await store.clear("b", rows=False)
    assert (store.deleted, store.forgotten) == (["a", "b"], ["a"])
    store.down = True
    await store.clear("c")
    assert "c" not in store.forgotten
    store.down = False
    await store.wait(3)
    assert (store.deleted, store.forgotten) == (["a", "b", "c"], ["a", "c"])
    assert not store.disposal.due


async def test_a_store_that_is_down_is_tried_seldom_and_cleared_when_it_is_back() -> None:
    store = Store()
    store.down = True
    for number in range(100):
        await store.clear(f"{number}")
    store.tries = 0
    await store.wait(600)
    assert store.tries < 60, "a few of each round, and ever longer pauses"
    store.down = False
    await store.wait(LONGEST_PAUSE + 1)
    assert sorted(store.deleted) == sorted(f"{number}" for number in range(100))


async def test_files_that_are_stuck_do_not_keep_the_others() -> None:
    store = Store()
    store.down = True
    store.stuck = {f"stuck {number}" for number in range(5)}
    for name in (*sorted(store.stuck), "free"):
        await store.clear(name)
    store.down = False
    await store.wait(120)
    assert store.deleted == ["free"]


async def test_a_job_that_is_deleted_while_the_store_is_down_is_gone_at_once_and_its_media_later(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalMedia, files: object) -> None:
        raise StorageFailed("the store cannot be reached")

    estate.add()
    await estate.ready()
    job = await estate.run()
    with monkeypatch.context() as store:
        store.setattr(LocalMedia, "remove", fail)
        await estate.service.delete(job.id)
        assert estate.service.page(output="video", after=None, limit=5, order="asc") == ([], False)
        assert await estate.rows() == {job.id}, "a restarted server would have to know"
        assert estate.media() == {f"{job.id}.mp4"}
    await until(lambda: not estate.media(), "the media being removed")
    await until(lambda: not estate.service._keeper._background, "the end of the deletion")
    assert await estate.rows() == set()
