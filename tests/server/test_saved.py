"""Files at the paths that clients asked for: what happens when that fails, and in the next life of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.house import until
from tests.server.test_recovery import Estate
from triptych.core.events import JobState
from triptych.server.records import SAVE_PATH
from triptych.server.saved import place_of


@pytest.fixture
async def estate(tmp_path: Path) -> AsyncIterator[Estate]:
    estate = Estate(tmp_path)
    await estate.open()
    estate.add()
    await estate.ready()
    yield estate
    await estate.close()


async def test_a_file_that_could_not_be_saved_is_saved_by_the_next_life(estate: Estate) -> None:
    job = await estate.submit(metadata={SAVE_PATH: "shelf/film.mp4"})
    (estate.outputs / "shelf").write_text("a file where a folder is needed")
    assert (await estate.end(job.id)).view.state is JobState.DONE
    assert "shelf/film.mp4" in await estate.service.saved.ensure(job.id)
    await estate.service.close()
    (estate.outputs / "shelf").unlink()
    await estate.open()
    await until((estate.outputs / "shelf" / "film.mp4").exists, "the file where it was wanted")
    assert await estate.service.saved.ensure(job.id) == ""


async def test_a_file_that_was_saved_is_not_brought_back(estate: Estate) -> None:
    job = await estate.submit(metadata={SAVE_PATH: "film.mp4"})
    await estate.end(job.id)
    assert await estate.service.saved.ensure(job.id) == ""
    (estate.outputs / "film.mp4").unlink()  # else the store's own copy, which it is a link to, would change too
    (estate.outputs / "film.mp4").write_text("edited")
    await estate.restart()
    assert await estate.service.saved.ensure(job.id) == ""
    assert (estate.outputs / "film.mp4").read_text() == "edited"
    file = estate.service.saved.find("film.mp4")
    assert file is not None
    assert file.path.read_bytes() == b"film"


async def test_nothing_is_noted_of_a_job_that_is_deleted(estate: Estate) -> None:
    job = await estate.submit(metadata={SAVE_PATH: "film.mp4"})
    await estate.end(job.id)
    await estate.service.saved.ensure(job.id)
    await estate.service.delete(job.id)
    assert await estate.rows() == set()
    assert estate.service.saved.find("film.mp4") is None
    assert (estate.outputs / "film.mp4").read_bytes() == b"film"


@pytest.mark.parametrize(
    ("path", "index", "place"),
    [("a.png", 0, "a.png"), ("a.png", 1, "a-1.png"), ("x.y/a.b.png", 12, "x.y/a.b-12.png")],
)
def test_files_behind_the_first_have_a_number(path: str, index: int, place: str) -> None:
    assert place_of(path, index) == place


async def test_a_file_that_is_saved_once_more_leaves_nothing_beside_it(estate: Estate) -> None:
    """Symptom: after a kill between saving and noting it, a second link stayed in the folder and pinned the bytes."""
    job = await estate.submit(metadata={SAVE_PATH: "shelf/film.mp4"})
    await estate.end(job.id)
    assert await estate.service.saved.ensure(job.id) == ""
    estate.service._records.get(job.id).saved = None
    assert await estate.service.saved.ensure(job.id) == ""
    assert [path.name for path in (estate.outputs / "shelf").iterdir()] == ["film.mp4"]
