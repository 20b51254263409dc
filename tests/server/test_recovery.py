"""A server that starts on the state of an earlier one, idempotency keys, and what is kept how long."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.server.house import QUICK, House, until
from tests.server.test_faults import metric
from tests.server.test_journal import limit_pages
from triptych.core.events import JobState
from triptych.core.journal import Deleting
from triptych.errors import BadRequest, ConfigError, NotFound, StorageFailed, StorageFull
from triptych.ids import ROLES, RequestId
from triptych.server.archive import DiskArchive
from triptych.server.idempotency import IdempotencyKey, KeyReused
from triptych.server.journal import Journal
from triptych.server.media_store import LocalMedia
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService

ENCODER, DENOISER, DECODER = ROLES


class Estate(House):
    """A house that can be left and entered again, with its state."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "outputs")
        self.state = folder / "state"

    def config(self, **settings: Any) -> Any:
        return super().config(**({"state_dir": self.state} | settings))

    async def restart(self, **settings: Any) -> DiffusionService:
        await self.service.close()
        return await self.open(**settings)

    @property
    def journal(self) -> Journal:
        archive = self.service._keeper._archive
        assert isinstance(archive, DiskArchive)
        return archive._journal

    async def submit(self, prompt: str = "a tree", **options: Any) -> JobRecord:
        return await self.service.submit({"prompt": prompt}, output="video", **options)

    async def rows(self) -> set[str]:
        """Requests of which the journal on the disk knows anything."""
        await self.journal.flush()
        database = self.journal._database
        assert database is not None
        return {request for (request,) in database.execute("SELECT DISTINCT request FROM entries").fetchall()}

    def media(self) -> set[str]:
        return {path.name for path in self.outputs.iterdir()}

    def images(self) -> set[str]:
        return {path.name for path in (self.state / "images").iterdir()}


@pytest.fixture
async def estate(tmp_path: Path) -> AsyncIterator[Estate]:
    estate = Estate(tmp_path)
    await estate.open()
    yield estate
    await estate.close()


# -- restarts ----------------------------------------------------------------------------------------------------------


async def test_a_stopped_server_goes_on_with_its_jobs_in_order(estate: Estate) -> None:
    puppet = estate.add(slots=1, hold=ENCODER)
    await estate.ready()
    finished_before = await estate.service.submit({"prompt": "0"}, output="video")
    await until(lambda: puppet.held, "the first stage")
    puppet.let_go()
    before = await estate.end(finished_before.id)
    puppet.hold = frozenset({ENCODER})
    jobs = [await estate.submit(str(i)) for i in range(4)]
    await until(lambda: puppet.held, "the second stage")
    await estate.restart()
    assert estate.service.get(before.id) == before
    page, more = estate.service.page(output="video", after=None, limit=10, order="asc")
    assert [record.id for record in page] == [before.id, *(job.id for job in jobs)]
    assert not more
    await estate.instances(1)
    await until(lambda: puppet.held, "the stage that went on")
    puppet.let_go()
    for job in jobs:
        record = await estate.end(job.id)
        assert (record.view.state, record.params) == (JobState.DONE, job.params)
        assert record.created_at == job.created_at
    seen = [lease.request for lease, _, _ in puppet.seen if lease.role is ENCODER]
    assert seen == [before.id, *(job.id for job in jobs)]
    assert (await estate.submit("later")).id > jobs[-1].id
    await estate.idle()


async def test_a_paused_job_stays_paused_until_it_is_resumed(estate: Estate) -> None:
    estate.add(ENCODER)
    await estate.instances(1)
    job = await estate.submit()
    await estate.reach(job.id, JobState.DENOISING_WAITING)
    estate.service.pause(job.id)
    await estate.restart()
    estate.add(DENOISER, DECODER)
    await estate.ready()
    await until(lambda: not estate.service._router._ledger.awaiting, "what the instances bring back")
    view = estate.service.get(job.id).view
    assert (view.paused, view.state) == (True, JobState.DENOISING_WAITING)
    estate.service.resume(job.id)
    assert (await estate.end(job.id)).view.state is JobState.DONE


async def test_files_that_a_hanging_store_has_not_taken_when_the_server_stops_are_stored_by_the_next(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def hang(path: Path, data: bytes) -> None:
        writing.set()
        assert go_on.wait(60)
        raise OSError("the store is gone")

    puppet = estate.add()
    await estate.ready()
    with monkeypatch.context() as store:
        store.setattr(LocalMedia, "_write", staticmethod(hang))
        job = await estate.submit()
        await until(writing.is_set, "the file to be written")
        assert not estate.service.pause(job.id).view.paused, "there is nothing left to pause"
        await asyncio.wait_for(estate.service.close(), 30)
    await estate.open()
    assert not estate.service.get(job.id).view.paused
    go_on.set()
    assert (await estate.end(job.id)).files[0].path.read_bytes() == b"film"
    assert len(puppet.seen) == 3, "nothing was made twice"


async def test_the_time_that_a_job_has_used_up_is_remembered(estate: Estate) -> None:
    estate.add(DENOISER, hold=DENOISER)
    estate.add(ENCODER, DECODER)
    await estate.ready()
    job = await estate.submit()
    await until(lambda: estate.service.get(job.id).view.running_seconds > 0.5, "some time to pass")
    before = estate.service.get(job.id).view
    await estate.restart()
    after = estate.service.get(job.id).view
    assert after.running_seconds >= before.running_seconds > 0.5
    assert after.waiting_seconds >= before.waiting_seconds


async def test_the_time_of_a_paused_job_is_remembered_too(estate: Estate) -> None:
    estate.add(ENCODER)
    await estate.instances(1)
    job = await estate.submit()
    await estate.reach(job.id, JobState.DENOISING_WAITING)
    await until(lambda: estate.service.get(job.id).view.waiting_seconds > 0.3, "some time to pass")
    before = estate.service.pause(job.id).view
    await estate.restart()
    assert estate.service.get(job.id).view.waiting_seconds >= before.waiting_seconds > 0.3


@pytest.mark.parametrize("output", ["video", "image"])
async def test_uploaded_images_survive_until_the_job_ends(estate: Estate, output: Literal["video", "image"]) -> None:
    """Those of a video until it is deleted, for it may be remixed."""
    puppet = estate.add(hold=ENCODER)
    await estate.ready()
    params = {"prompt": "x", "image": {"blob": 0}}
    job = await estate.service.submit(params, output=output, images=[b"picture", b"other"])
    await until(lambda: puppet.held, "the stage")
    puppet.crash()
    await estate.restart(router=QUICK)
    assert estate.images() == {f"{job.id}.images"}
    another = estate.add()
    assert (await estate.end(job.id)).view.state is JobState.DONE
    assert next(blobs for lease, _, blobs in another.seen if lease.role is ENCODER) == (b"picture", b"other")
    if output == "video":
        await estate.restart()
        assert await estate.service.images(job.id) == (b"picture", b"other")
        await estate.service.delete(job.id)
    await until(lambda: not estate.images(), "the images being removed")


async def test_images_that_are_kept_count_as_bytes_of_media(estate: Estate) -> None:
    await estate.restart(retained_bytes=100_000)
    estate.add()
    await estate.ready()
    params = {"prompt": "x", "image": {"blob": 0}}
    for _ in range(3):
        job = await estate.service.submit(params, output="video", images=[bytes(60_000)])
        await estate.end(job.id)
    await until(lambda: estate.images() == {f"{job.id}.images"}, "the older ones being forgotten")
    await estate.restart(retained_bytes=100_000)
    assert estate.images() == {f"{job.id}.images"}


async def test_a_job_whose_images_are_lost_fails_and_says_so(estate: Estate) -> None:
    estate.add(hold=ENCODER)
    await estate.ready()
    job = await estate.service.submit({"prompt": "x", "image": {"blob": 0}}, output="video", images=[b"picture"])
    await estate.service.close()
    (estate.state / "images" / f"{job.id}.images").unlink()
    await estate.open()
    view = estate.service.get(job.id).view
    assert view.state is JobState.FAILED
    assert view.error is not None
    assert view.error.code == "images_lost"


async def test_a_cancelled_job_stays_cancelled_and_a_deleted_one_deleted(estate: Estate) -> None:
    estate.add(hold=DENOISER, slots=4)
    await estate.ready()
    cancelled, deleted, done = [await estate.submit(name) for name in ("cancelled", "deleted", "done")]
    await estate.service.cancel(cancelled.id)
    await estate.service.delete(deleted.id)
    assert await estate.rows() == {cancelled.id, done.id}
    await estate.restart()
    assert estate.service.get(cancelled.id).view.state is JobState.CANCELLED
    with pytest.raises(NotFound):
        estate.service.get(deleted.id)


async def test_a_deletion_that_was_cut_short_is_finished_by_the_next_server(estate: Estate) -> None:
    estate.add()
    await estate.ready()
    job = await estate.run()
    estate.journal.note(Deleting(request=job.id))
    await estate.restart()
    with pytest.raises(NotFound):
        estate.service.get(job.id)
    await until(lambda: not estate.media(), "the media being removed")
    await until(lambda: not estate.service._keeper._background, "the end of the deletion")
    assert await estate.rows() == set()


async def test_a_state_folder_in_use_is_refused_and_the_ports_are_free_again(estate: Estate, tmp_path: Path) -> None:
    other = House(tmp_path / "other")
    with pytest.raises(ConfigError, match="in use by another server"):
        await other.open(state_dir=estate.state)
    await other.service.close()
    await other.open(state_dir=tmp_path / "free")
    await other.close()


# -- a full disk -------------------------------------------------------------------------------------------------------


async def test_a_request_that_cannot_be_written_down_is_refused_with_507_and_nothing_is_lost(estate: Estate) -> None:
    puppet = estate.add(hold=ENCODER)
    await estate.ready()
    before = await estate.submit("before")
    await until(lambda: puppet.held, "the stage")
    await estate.journal.flush()
    limit_pages(estate.journal, 0)
    with pytest.raises(StorageFull) as caught:
        await estate.submit("x" * 100_000)
    assert caught.value.status == 507
    page, _ = estate.service.page(output="video", after=None, limit=10, order="asc")
    assert [record.id for record in page] == [before.id]
    puppet.let_go()
    assert (await estate.end(before.id)).view.state is JobState.DONE
    limit_pages(estate.journal, 10_000)
    assert (await estate.run("x" * 100_000)).view.state is JobState.DONE


async def test_a_server_whose_journal_cannot_be_written_is_not_ready_until_it_can(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: balancers went on sending everything to a server that refused everything."""
    estate.add()
    await estate.ready()
    failing = {"store": "journal"}
    with monkeypatch.context() as disk:
        disk.setattr(Journal, "_commit", lambda *_: StorageFull("no room for the journal", detail="/secret/place"))
        with pytest.raises(StorageFull):
            await estate.submit()
        verdict = estate.service.readiness()
        assert not verdict.ready
        assert verdict.reasons == ("no job can be accepted: no room for the journal",)
        assert metric(estate.service, "triptych_storage_failing", **failing) == 1
    await estate.ready()  # though nobody asks for anything
    assert estate.service.readiness().reasons == ()
    assert metric(estate.service, "triptych_storage_failing", **failing) == 0
    assert (await estate.run()).view.state is JobState.DONE


async def test_a_state_folder_that_is_gone_is_told_and_nothing_more_is_accepted(estate: Estate) -> None:
    estate.add()
    await estate.ready()
    shutil.rmtree(estate.state)
    await until(lambda: not estate.service.readiness().ready, "the loss to be noticed")
    assert estate.service.readiness().reasons == (
        "no job can be accepted: the state folder was taken away or replaced",
    )
    with pytest.raises(StorageFailed, match="start the server anew"):
        await estate.submit()
    await estate.restart()
    await estate.ready()
    assert (await estate.run()).view.state is JobState.DONE


async def test_images_that_cannot_be_written_down_refuse_the_request(estate: Estate) -> None:
    estate.add()
    await estate.ready()
    (estate.state / "images").rmdir()
    with pytest.raises(StorageFailed, match=r"uploaded images cannot be kept: .*images"):
        await estate.service.submit({"prompt": "x", "image": {"blob": 0}}, output="video", images=[b"picture"])
    (estate.state / "images").mkdir()
    assert await estate.rows() == set()
    assert len(estate.service._records) == 0


# -- idempotency keys --------------------------------------------------------------------------------------------------

KEY = IdempotencyKey("order-7", "digest of the body")


async def test_a_key_used_twice_is_one_job_also_at_the_same_time(estate: Estate) -> None:
    estate.add()
    await estate.ready()
    records = await asyncio.gather(*(estate.submit(idempotency_key=KEY) for _ in range(20)))
    assert len({record.id for record in records}) == 1
    assert len(estate.service._records) == 1
    other = await estate.submit(idempotency_key=IdempotencyKey("order-8", KEY.digest))
    stranger = await estate.submit(idempotency_key=IdempotencyKey(KEY.value, "digest", "another client"))
    assert len({records[0].id, other.id, stranger.id}) == 3


async def test_a_key_is_refused_for_another_order_also_after_a_restart(estate: Estate) -> None:
    estate.add()
    await estate.ready()
    job = await estate.submit(idempotency_key=KEY)
    await estate.end(job.id)
    for _ in range(2):
        assert (await estate.submit(idempotency_key=KEY)).id == job.id
        with pytest.raises(KeyReused, match="'order-7': was used for a request with other content") as caught:
            await estate.submit(idempotency_key=IdempotencyKey(KEY.value, "another digest"))
        assert caught.value.status == 409
        await estate.restart()


async def test_a_key_is_free_when_its_request_was_refused_or_its_job_is_forgotten(estate: Estate) -> None:
    with pytest.raises(Exception, match="no encoder has registered"):
        await estate.submit(idempotency_key=KEY)
    estate.add()
    await estate.ready()
    job = await estate.submit(idempotency_key=KEY)
    await estate.service.delete(job.id)
    again = await estate.submit(idempotency_key=IdempotencyKey(KEY.value, "something else"))
    assert again.id != job.id
    assert len(estate.service._keeper.keys) == 1


async def test_a_key_is_free_as_soon_as_the_deletion_of_its_job_begins(estate: Estate) -> None:
    estate.add(hold=ENCODER)
    await estate.ready()
    job = await estate.submit(idempotency_key=KEY)
    deletion = asyncio.create_task(estate.service.delete(job.id))
    await asyncio.sleep(0)
    assert not deletion.done()
    again = await estate.submit(idempotency_key=KEY)
    await deletion
    assert again.id != job.id
    assert (await estate.submit(idempotency_key=KEY)).id == again.id


async def test_a_deletion_of_an_earlier_life_leaves_the_key_to_the_job_that_has_it_now(estate: Estate) -> None:
    estate.add(hold=ENCODER)
    await estate.ready()
    job = await estate.submit(idempotency_key=KEY)
    estate.service._keeper.free_key(estate.service._records.get(job.id))
    again = await estate.submit(idempotency_key=KEY)
    estate.journal.note(Deleting(request=job.id))
    await estate.restart()
    await until(lambda: not estate.service._keeper._background, "the end of the deletion")
    assert (await estate.submit(idempotency_key=KEY)).id == again.id


async def test_a_client_that_hangs_up_leaves_no_key_that_never_ends(estate: Estate) -> None:
    estate.add()
    await estate.ready()
    first = asyncio.create_task(estate.submit(idempotency_key=KEY))
    await asyncio.sleep(0)
    first.cancel()
    job = await estate.submit(idempotency_key=KEY)
    assert (await estate.end(job.id)).view.state is JobState.DONE
    assert len(estate.service._records) == 1


@pytest.mark.parametrize("value", ["", "x" * 256, "two\nlines"])
def test_a_key_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="1 to 255"):
        IdempotencyKey(value, "d")


# -- retention ---------------------------------------------------------------------------------------------------------


async def test_the_oldest_ended_jobs_go_by_count_with_everything_they_left(estate: Estate) -> None:
    await estate.restart(retained_jobs=2)
    estate.add()
    await estate.ready()
    jobs = [await estate.run(str(i)) for i in range(5)]
    kept = {job.id for job in jobs[-2:]}
    await until(lambda: estate.media() == {f"{id}.mp4" for id in kept}, "old media being removed")
    await until(lambda: not estate.service._keeper._background, "the end of all deletions")
    assert await estate.rows() == kept


async def test_the_oldest_ended_jobs_go_by_bytes_but_never_the_last_one(estate: Estate) -> None:
    await estate.restart(retained_bytes=25)
    estate.add(media=b"ten bytes.")
    await estate.ready()
    jobs = [await estate.run(str(i)) for i in range(4)]
    await until(lambda: estate.media() == {f"{job.id}.mp4" for job in jobs[-2:]}, "old media being removed")
    await estate.restart(retained_bytes=5)
    await until(lambda: estate.media() == {f"{jobs[-1].id}.mp4"}, "a smaller limit taking effect")
    assert estate.service.get(jobs[-1].id).files[0].path.read_bytes() == b"ten bytes."


async def test_jobs_go_by_age_also_when_they_ended_in_an_earlier_life(estate: Estate) -> None:
    estate.add()
    await estate.ready()
    job = await estate.run()
    await estate.restart(retained_seconds=0.2)
    await until(lambda: not estate.media(), "old media being removed")
    with pytest.raises(NotFound):
        estate.service.get(RequestId(job.id))


def test_a_limit_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="retained_bytes=0"):
        House(tmp_path).config(retained_bytes=0)
