"""The service through real sockets: every accepted request ends exactly once, with its files or with its reason."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.server.house import PATIENCE, House, until
from triptych.core.events import JobState
from triptych.core.instance_events import Stepped
from triptych.errors import BadRequest, ConfigError, NotFound, NotReady
from triptych.ids import ROLES, RequestId, Role
from triptych.server.service import DiffusionService

ENCODER, DENOISER, DECODER = ROLES


async def test_a_request_passes_three_instances_and_its_file_is_kept(house: House) -> None:
    puppets = [house.add(role) for role in ROLES]
    await house.ready()
    record = await house.run("a lighthouse")
    assert record.view.state is JobState.DONE
    assert record.params == {"prompt": "a lighthouse"}
    assert [timing.role for timing in record.view.timings] == list(ROLES)
    (file,) = record.files
    assert file.path == house.outputs / f"{record.id}.mp4"
    assert file.path.read_bytes() == b"film"
    assert record.created_at <= (record.started_at or 0) <= (record.completed_at or 0)
    assert [[lease.role for lease, _, _ in puppet.seen] for puppet in puppets] == [[role] for role in ROLES]
    await house.idle()


async def test_many_requests_at_once_all_end_done(house: House) -> None:
    for role in ROLES:
        house.add(role, slots=3)
    house.add()
    await house.instances(4)
    records = await asyncio.gather(*(house.run(f"number {i}") for i in range(100)))
    assert {record.view.state for record in records} == {JobState.DONE}
    assert len({record.files[0].path for record in records}) == 100
    await house.idle()


async def test_before_an_instance_has_registered_requests_are_refused_with_503(house: House) -> None:
    assert house.service.schema() is None
    with pytest.raises(NotReady, match="no encoder has registered") as caught:
        await house.service.submit({"prompt": "x"}, output="video")
    assert caught.value.status == 503
    house.add()
    await house.ready()
    schema = house.service.schema()
    assert schema is not None
    assert schema.model == "noop"


async def test_a_request_waits_for_a_role_that_comes_later(house: House) -> None:
    house.add(ENCODER, DENOISER)
    await house.instances(1)
    record = await house.service.submit({"prompt": "x"}, output="video")
    await house.reach(record.id, JobState.DECODER_WAITING)
    house.add(DECODER)
    assert (await house.end(record.id)).view.state is JobState.DONE


async def test_a_paused_job_waits_until_it_is_resumed_and_others_pass_it(house: House) -> None:
    encoder = house.add(ENCODER)
    await house.instances(1)
    encoder.leave()
    house.add(DECODER)
    record = await house.service.submit({"prompt": "x"}, output="video")
    assert house.service.pause(record.id).view.paused
    house.add(ENCODER, DENOISER)
    assert (await house.run()).view.state is JobState.DONE
    assert house.service.get(record.id).view.state is JobState.ENCODER_WAITING
    assert not house.service.resume(record.id).view.paused
    assert (await house.end(record.id)).view.state is JobState.DONE
    assert house.service.pause(record.id).view.state is JobState.DONE


async def test_ids_that_nobody_knows_are_not_found(house: House) -> None:
    nobody = RequestId("video_" + "0" * 32)
    for call in (house.service.wait, house.service.cancel, house.service.delete):
        with pytest.raises(NotFound, match=nobody):
            await call(nobody)
    with pytest.raises(NotFound, match=nobody):
        house.service.get(nobody)
    with pytest.raises(NotFound, match=nobody):
        house.service.watch(nobody)


# -- watching --------------------------------------------------------------------------------------------------------


async def test_a_watcher_sees_states_in_order_up_to_the_final_one(house: House) -> None:
    puppet = house.add(hold=DENOISER)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    seen: list[JobState] = []
    async for now in house.service.watch(record.id):
        seen.append(now.view.state)
        if now.view.state is JobState.DENOISING_RUNNING and puppet.held:
            puppet.let_go()
    order = list(JobState)
    assert seen == sorted(seen, key=order.index)
    assert JobState.DENOISING_RUNNING in seen
    assert seen[-1] is JobState.DONE
    assert seen.count(JobState.DONE) == 1


async def test_a_slow_watcher_gets_the_latest_state_only_and_holds_no_memory(house: House) -> None:
    puppet = house.add(hold=DENOISER)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    watcher = house.service.watch(record.id)
    first = await anext(watcher)
    await house.reach(record.id, JobState.DENOISING_RUNNING)
    (lease,) = puppet.held
    for step in range(1, 51):
        puppet.post(Stepped(lease=lease, step=step, steps=50))
    await until(lambda: house.service.get(record.id).view.step == 50, "the last step")
    assert house.service._records.get(record.id).watchers == []
    second = await anext(watcher)
    assert (first.view.step, second.view.step, second.view.steps) == (0, 50, 50)
    puppet.let_go()
    rest = [now.view.state async for now in watcher]
    assert rest[-1] is JobState.DONE


async def test_a_watcher_that_goes_away_leaves_nothing_behind(house: House) -> None:
    puppet = house.add(hold=ENCODER)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    await house.reach(record.id, JobState.ENCODER_RUNNING)

    async def watch() -> None:
        async for _ in house.service.watch(record.id):
            pass

    tasks = [asyncio.create_task(watch()), asyncio.create_task(house.end(record.id))]
    entry = house.service._records.get(record.id)
    await until(lambda: entry.watchers and entry.waiters, "both to wait")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (entry.watchers, entry.waiters) == ([], [])
    puppet.let_go()
    assert (await house.end(record.id)).view.state is JobState.DONE


# -- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_cancelling_a_running_stage_frees_its_slot(house: House, role: Role) -> None:
    house.add(hold=role, slots=1)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    running = {ENCODER: "encoder_running", DENOISER: "denoising_running", DECODER: "decoder_running"}[role]
    await house.reach(record.id, JobState(running))
    cancelled = await house.service.cancel(record.id)
    assert cancelled.view.state is JobState.CANCELLED
    assert (await house.service.cancel(record.id)).view.state is JobState.CANCELLED
    assert (await house.end(record.id)).view.state is JobState.CANCELLED
    await house.idle()


async def test_cancelling_a_queued_request_lets_those_behind_it_move_up(house: House) -> None:
    puppet = house.add(hold=ENCODER, slots=1)
    await house.ready()
    records = [await house.service.submit({"prompt": str(i)}, output="video") for i in range(3)]
    assert [house.service.get(r.id).view.position for r in records] == [None, 0, 1]
    await house.service.cancel(records[1].id)
    await until(lambda: puppet.held, "the first to be taken up")
    puppet.let_go()
    ends = [(await house.end(r.id)).view.state for r in records]
    assert ends == [JobState.DONE, JobState.CANCELLED, JobState.DONE]


async def test_cancelling_what_has_ended_changes_nothing(house: House) -> None:
    house.add()
    await house.ready()
    done = await house.run()
    assert (await house.service.cancel(done.id)) == done


async def test_deleting_removes_the_record_and_its_media(house: House) -> None:
    house.add()
    await house.ready()
    record = await house.run()
    deleted = await house.service.delete(record.id)
    assert deleted.view.state is JobState.DONE
    assert list(house.outputs.iterdir()) == []
    with pytest.raises(NotFound):
        house.service.get(record.id)


async def test_deleting_a_live_job_stops_it_and_ends_those_who_wait_for_it(house: House) -> None:
    house.add(hold=DENOISER, slots=1)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    await house.reach(record.id, JobState.DENOISING_RUNNING)
    waiting = asyncio.create_task(house.end(record.id))
    await until(lambda: house.service._records.get(record.id).waiters, "a waiter")
    deleted = await house.service.delete(record.id)
    assert deleted.view.state is JobState.CANCELLED
    assert (await waiting).view.state is JobState.CANCELLED
    await house.idle()


# -- timeouts --------------------------------------------------------------------------------------------------------


async def test_a_request_that_waits_too_long_says_in_which_state_and_why(house: House) -> None:
    house.add(ENCODER, DENOISER)
    await house.instances(1)
    record = await house.service.submit({"prompt": "x"}, output="video", queue_timeout=1.5)
    ended = await house.end(record.id)
    assert ended.view.state is JobState.TIMED_OUT
    assert ended.view.error is not None
    assert ended.view.error.code == "queue_timeout"
    assert "decoder_waiting" in ended.view.error.message
    assert "no live decoder instance" in ended.view.error.message
    await house.idle()


async def test_a_request_that_runs_too_long_says_where(house: House) -> None:
    house.add(hold=DENOISER)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video", run_timeout=1.5)
    ended = await house.end(record.id)
    assert ended.view.state is JobState.TIMED_OUT
    assert ended.view.error is not None
    assert ended.view.error.code == "run_timeout"
    assert "denoising_running" in ended.view.error.message
    await house.idle()


# -- images ----------------------------------------------------------------------------------------------------------


async def test_images_reach_the_encoder_and_only_the_encoder(house: House) -> None:
    puppet = house.add()
    await house.ready()
    params = {"prompt": "x", "image": {"blob": 1}, "masks": [{"blob": 0}]}
    record = await house.service.submit(params, output="video", images=(b"mask", b"picture"))
    await house.end(record.id)
    assert [blobs for _, _, blobs in puppet.seen] == [(b"mask", b"picture"), (), ()]
    assert house.service._shell is not None
    assert house.service._shell.blobs == {}


@pytest.mark.parametrize("value", [{"blob": 1}, {"blob": -1}, [{"blob": 0}, {"blob": 7}], {}])
async def test_an_image_that_was_not_uploaded_is_refused_by_name(house: House, value: object) -> None:
    house.add()
    await house.ready()
    with pytest.raises(BadRequest, match="image=") as caught:
        await house.service.submit({"prompt": "x", "image": value}, output="video", images=(b"picture",))
    assert caught.value.field == "image"


# -- pages -----------------------------------------------------------------------------------------------------------


async def test_pages_list_jobs_of_one_kind_newest_or_oldest_first(house: House) -> None:
    house.add(hold=ENCODER)
    await house.ready()
    videos = [(await house.service.submit({"prompt": str(i)}, output="video")).id for i in range(5)]
    await house.service.submit({"prompt": "still"}, output="image")
    page, more = house.service.page(output="video", after=None, limit=2, order="desc")
    assert ([r.id for r in page], more) == ([videos[4], videos[3]], True)
    page, more = house.service.page(output="video", after=page[-1].id, limit=3, order="desc")
    assert ([r.id for r in page], more) == ([videos[2], videos[1], videos[0]], False)
    page, more = house.service.page(output="video", after=videos[3], limit=10, order="asc")
    assert ([r.id for r in page], more) == ([videos[4]], False)


async def test_only_so_many_ended_jobs_are_kept_and_their_media_go_with_them(tmp_path: Path) -> None:
    house = House(tmp_path / "outputs")
    await house.open(retained_jobs=2)
    house.add()
    await house.ready()
    records = [await house.run(str(i)) for i in range(4)]
    kept = {record.files[0].name for record in records[2:]}
    await until(lambda: {p.name for p in house.outputs.iterdir()} == kept, "old media to go")
    page, _ = house.service.page(output="video", after=None, limit=10, order="asc")
    assert [record.id for record in page] == [record.id for record in records[2:]]
    await house.close()


# -- life of the server ----------------------------------------------------------------------------------------------


async def test_a_taken_port_is_named(house: House, tmp_path: Path) -> None:
    second = DiffusionService(house.config())
    with pytest.raises(ConfigError, match=str(house.port + 1)):
        await second.start()
    await second.close()


async def test_closing_wakes_who_waits_and_frees_the_ports(house: House) -> None:
    house.add(hold=ENCODER)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    entry = house.service._records.get(record.id)

    async def watch() -> None:
        async for _ in house.service.watch(record.id):
            pass

    tasks = [asyncio.create_task(watch()), asyncio.create_task(house.service.wait(record.id))]
    await until(lambda: entry.watchers and entry.waiters, "both to wait")
    await house.service.close()
    for task in tasks:
        with pytest.raises(NotReady, match="stopping"):
            await asyncio.wait_for(task, PATIENCE)
    for port in range(house.port + 1, house.port + 5):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    with pytest.raises(NotReady, match="stopping"):
        await house.service.submit({"prompt": "x"}, output="video")


def test_a_running_server_has_loaded_no_torch(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from triptych.launch.ports import free_ports
from triptych.config import ServerConfig
from triptych.server.service import DiffusionService

async def serve():
    port, *_ = free_ports(5)
    service = DiffusionService(ServerConfig(port=port, scheduler_port=port + 1, output_dir=Path(sys.argv[1])))
    await service.start()
    assert not service.readiness().ready
    await service.close()

asyncio.run(serve())
heavy = {"torch", "diffusers", "transformers", "numpy", "PIL", "av", "fastapi"}
print(sorted(heavy & sys.modules.keys()))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


async def test_books_that_do_not_add_up_are_told_once_nothing_is_live(house: House) -> None:
    house.add()
    await house.ready()
    await house.run()
    (member,) = house.service._router._ledger.members.values()
    member.retained[Role.ENCODER] += 64
    samples = 'triptych_events_total{name="books_wrong"}'
    await until(lambda: samples in generate_latest(house.service.registry).decode(), "the audit")
    member.retained[Role.ENCODER] -= 64
