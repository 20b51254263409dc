"""Faults around a running server: dead and restarted instances, garbage on every socket, a full disk, slow storage."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.house import QUICK, House, until
from triptych.core.events import JobState, Received, RouterAction, RouterEvent
from triptych.errors import StorageFull
from triptych.ids import ROLES, Role
from triptych.server.media_store import LocalMedia
from triptych.server.service import DiffusionService
from triptych.wire.messages import Staged

ENCODER, DENOISER, DECODER = ROLES

GARBAGE = (
    b"",
    b"\x00",
    b"\xff" * 4096,
    b'{"type": "hello"}',
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94.",
    msgspec.msgpack.encode({"type": "hello"}),
    msgspec.msgpack.encode([1, 2, 3]),
    msgspec.msgpack.encode([{"type": "no_such_message"}]),
    msgspec.msgpack.encode([{"type": "goodbye", "instance": 5, "epoch": None, "server_epoch": None, "reason": "x"}]),
    msgspec.msgpack.encode(
        [{"type": "goodbye", "instance": "i", "epoch": "e", "server_epoch": None, "reason": "x", "extra": 1}]
    ),
    msgspec.msgpack.encode([[[[[[]]]]]]),
    b"\x91" * 100_000,
)


def metric(service: DiffusionService, name: str, /, **labels: str) -> float:
    """One value of the service's metrics; 0 when it is not there."""
    for family in text_string_to_metric_families(generate_latest(service.registry).decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return 0.0


@pytest.fixture
async def quick(tmp_path: Path) -> AsyncIterator[House]:
    """A server that notices dead instances quickly."""
    house = House(tmp_path / "outputs")
    await house.open(router=QUICK)
    yield house
    await house.close()


# -- instances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_work_of_a_dead_instance_goes_to_another(quick: House, role: Role) -> None:
    victim = quick.add(hold=role)
    await quick.ready()
    record = await quick.service.submit({"prompt": "x"}, output="video")
    await until(lambda: victim.held, "the victim to work")
    heir = quick.add()
    await quick.instances(2)
    victim.crash()
    ended = await quick.end(record.id)
    assert ended.view.state is JobState.DONE
    assert ended.view.attempt > 1
    assert ended.files[0].path.read_bytes() == b"film"
    assert role in [lease.role for lease, _, _ in heir.seen]
    assert metric(quick.service, "triptych_instance_up", instance_id=victim.instance) == 0
    assert metric(quick.service, "triptych_instance_up", instance_id=heir.instance) == 1
    assert metric(quick.service, "triptych_events_total", name="instance_lost") == 1
    await quick.idle()


async def test_an_instance_that_restarts_in_the_middle_gets_its_work_again(quick: House) -> None:
    first = quick.add(hold=DENOISER)
    await quick.ready()
    record = await quick.service.submit({"prompt": "x"}, output="video")
    await until(lambda: first.held, "the first life to work")
    first.crash()
    second = quick.add(port=first.port)
    ended = await quick.end(record.id)
    assert ended.view.state is JobState.DONE
    assert second.instance == first.instance
    assert [lease.role for lease, _, _ in second.seen] == list(ROLES)
    await quick.idle()


async def test_an_instance_that_says_goodbye_is_replaced_at_once(house: House) -> None:
    leaver = house.add(hold=ENCODER)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    await until(lambda: leaver.held, "the leaver to work")
    house.add()
    await house.instances(2)
    leaver.leave()
    assert (await house.end(record.id)).view.state is JobState.DONE


async def test_the_encoder_gets_its_images_again_when_its_output_is_lost(quick: House) -> None:
    encoder = quick.add(ENCODER)
    denoiser = quick.add(DENOISER, hold=DENOISER)
    quick.add(DECODER)
    await quick.ready()
    params = {"prompt": "x", "image": {"blob": 0}}
    record = await quick.service.submit(params, output="video", images=(b"picture",))
    await until(lambda: denoiser.held, "the denoiser to work")
    encoder.crash()
    await quick.instances(2)
    denoiser.crash()
    again = quick.add(ENCODER)
    quick.add(DENOISER)
    assert (await quick.end(record.id)).view.state is JobState.DONE
    assert [blobs for _, _, blobs in again.seen] == [(b"picture",)]


async def test_instances_come_back_to_a_restarted_server(house: House) -> None:
    puppet = house.add(hold=ENCODER, slots=1)
    await house.ready()
    await house.service.submit({"prompt": "lost with the server"}, output="video")
    await until(lambda: puppet.held, "the instance to work")
    await house.service.close()
    await house.open()
    await house.ready()
    await house.idle()
    puppet.hold = frozenset()
    assert (await house.run()).view.state is JobState.DONE
    assert len(house.puppets) == 1


# -- the router itself -----------------------------------------------------------------------------------------------


async def test_a_message_that_breaks_the_router_costs_that_message_only(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for role in ROLES:
        house.add(role)
    await house.ready()
    router = house.service._router
    real_handle, broken = router.handle, 0

    def handle(event: RouterEvent, now: float) -> list[RouterAction]:
        nonlocal broken
        if isinstance(event, Received) and isinstance(event.message, Staged) and broken < 3:
            broken += 1
            raise RuntimeError("a bug")
        return real_handle(event, now)

    monkeypatch.setattr(router, "handle", handle)
    records = await asyncio.gather(*(house.run(str(i)) for i in range(10)))
    assert {record.view.state for record in records} == {JobState.DONE}
    assert broken == 3
    assert caplog.text.count("RuntimeError: a bug") == 3
    await house.idle()


async def test_a_request_that_the_router_cannot_take_is_not_listed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.add()
    await house.ready()

    def handle(event: RouterEvent, now: float) -> list[RouterAction]:
        raise RuntimeError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(house.service._router, "handle", handle)
        with pytest.raises(RuntimeError, match="a bug"):
            await house.service.submit({"prompt": "x"}, output="video", images=(b"picture",))
    assert house.service.page(output="video", after=None, limit=5, order="asc") == ([], False)
    assert house.service._shell is not None
    assert house.service._shell.blobs == {}
    assert (await house.run()).view.state is JobState.DONE


# -- sockets ---------------------------------------------------------------------------------------------------------


async def test_garbage_on_every_socket_is_dropped_and_counted_while_honest_requests_finish(house: House) -> None:
    for role in ROLES:
        house.add(role)
    await house.ready()
    context = zmq.Context()
    senders = [context.socket(zmq.DEALER), *(context.socket(zmq.PUSH) for _ in ROLES)]
    try:
        for offset, sender in enumerate(senders):
            sender.setsockopt(zmq.LINGER, 0)
            sender.connect(f"tcp://127.0.0.1:{house.port + 1 + offset}")
        honest = [asyncio.create_task(house.run(str(i))) for i in range(20)]
        for frame in GARBAGE:
            for sender in senders:
                await asyncio.to_thread(sender.send, frame)
        for sender in senders:
            await asyncio.to_thread(sender.send_multipart, [GARBAGE[6], b"blob", b"blob"])
        records = await asyncio.gather(*honest)
        expected = dict.fromkeys(("frontend", *ROLES), len(GARBAGE) + 1)
        await until(lambda: house.service.info()["dropped"] == expected, "all garbage to be counted")
    finally:
        context.destroy(linger=0)
    assert {record.view.state for record in records} == {JobState.DONE}
    counted = "triptych_dropped_frames_total"
    await until(lambda: metric(house.service, counted, socket="frontend") == len(GARBAGE) + 1, "the metric")
    assert (await house.run()).view.state is JobState.DONE
    await house.idle()


# -- files -----------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


async def test_a_full_disk_takes_no_new_requests_and_keeps_finished_work_until_there_is_room(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet = house.add()
    await house.ready()
    earlier = await house.run("earlier")
    real_write = LocalMedia._write

    def no_room(path: Path, data: bytes) -> None:
        real_write(path, data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(LocalMedia, "_write", staticmethod(no_room))
        disk.setattr(shutil, "disk_usage", lambda _: Usage(100, 100, 0))
        made = await house.service.submit({"prompt": "too much"}, output="video")
        hopeless = await house.service.submit({"prompt": "too much for too long"}, output="video", run_timeout=3.0)
        await until(lambda: metric(house.service, "triptych_events_total", name="store_failed") >= 2, "two failures")
        failed = await house.end(hopeless.id)
        assert failed.view.state is JobState.FAILED
        assert failed.view.error is not None
        assert (failed.view.error.code, failed.view.error.blame) == ("storage_full", "operator")
        assert str(house.outputs) not in failed.view.error.message, "clients see it"
        assert house.service.get(made.id).view.state is JobState.DECODER_RUNNING
        verdict = house.service.readiness()
        assert not verdict.ready
        assert verdict.reasons == ("files cannot be stored: no room for finished media",)
        with pytest.raises(StorageFull, match=str(house.outputs)) as caught:
            await house.service.submit({"prompt": "x"}, output="video")
        assert caught.value.status == 507
        assert [p.name for p in house.outputs.iterdir()] == [earlier.files[0].name]
    assert earlier.files[0].path.read_bytes() == b"film"
    kept = await house.end(made.id)
    assert kept.files[0].path.read_bytes() == b"film"
    assert len([lease for lease, _, _ in puppet.seen if lease.request == made.id]) == 3, "nothing was made twice"
    assert (await house.run("room again")).view.state is JobState.DONE
    await house.idle()


async def test_a_store_that_cannot_be_written_is_told_and_its_work_is_kept(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, data: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error")

    house.add()
    await house.ready()
    with monkeypatch.context() as disk:
        disk.setattr(LocalMedia, "_write", staticmethod(broken))
        made = await house.service.submit({"prompt": "x"}, output="video")
        await until(lambda: house.service.readiness().reasons, "the failure to be told")
        verdict = house.service.readiness()
        assert verdict.ready  # the work can be done, and is kept
        assert verdict.reasons == ("files cannot be stored: the output folder cannot be written",)
        assert metric(house.service, "triptych_storage_failing", store="media") == 1
    await until(lambda: not house.service.readiness().reasons, "the store to be well again")
    assert metric(house.service, "triptych_storage_failing", store="media") == 0
    assert (await house.end(made.id)).view.state is JobState.DONE


async def test_an_output_folder_that_is_taken_away_is_made_again(house: House) -> None:
    """Symptom: after that every job stood at 92 % until its run timeout."""
    house.add()
    await house.ready()
    house.outputs.rmdir()
    made = await house.run()
    assert made.view.state is JobState.DONE
    assert made.files[0].path.read_bytes() == b"film"


async def test_a_store_that_raises_what_nobody_expects_fails_one_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, data: bytes) -> None:
        raise RuntimeError("a bug")

    house.add()
    await house.ready()
    with monkeypatch.context() as disk:
        disk.setattr(LocalMedia, "_write", staticmethod(broken))
        failed = await house.run()
    assert failed.view.error is not None
    assert (failed.view.error.code, failed.view.error.message) == (
        "storage_failed",
        "the files could not be kept: RuntimeError",
    )
    assert (await house.run()).view.state is JobState.DONE
    await house.idle()


async def test_a_request_that_is_deleted_while_its_file_is_written_leaves_no_file(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    real_write = LocalMedia._write

    def slow(path: Path, data: bytes) -> None:
        writing.set()
        assert go_on.wait(60)
        real_write(path, data)

    monkeypatch.setattr(LocalMedia, "_write", staticmethod(slow))
    house.add()
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    await until(writing.is_set, "the file to be written")
    assert house.service.get(record.id).view.state is JobState.DECODER_RUNNING
    assert (await house.service.delete(record.id)).view.state is JobState.CANCELLED
    go_on.set()
    await house.idle()
    await house.service.close()
    assert list(house.outputs.iterdir()) == []


async def test_the_loop_stays_free_while_a_file_is_written(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real_write = LocalMedia._write

    def first_one_waits(path: Path, data: bytes) -> None:
        assert not data.startswith(b"slow") or go_on.wait(60)
        real_write(path, data)

    monkeypatch.setattr(LocalMedia, "_write", staticmethod(first_one_waits))
    puppet = house.add(media=b"slow")
    await house.ready()
    slow = await house.service.submit({"prompt": "slow"}, output="video")
    await house.reach(slow.id, JobState.DECODER_RUNNING)
    puppet.media = b"quick"
    assert (await house.run("quick")).view.state is JobState.DONE
    assert house.service.get(slow.id).view.state is JobState.DECODER_RUNNING
    go_on.set()
    assert (await house.end(slow.id)).files[0].path.read_bytes() == b"slow"


# -- readiness -------------------------------------------------------------------------------------------------------


async def test_readiness_follows_the_instances(tmp_path: Path) -> None:
    house = House(tmp_path / "outputs")
    named = {DENOISER: (f"tcp://localhost:{house.port + 6}",)}
    await house.open(router=QUICK, instance_urls=named)
    reasons = house.service.readiness().reasons
    assert len(reasons) == 4
    assert named[DENOISER][0] in reasons[3]
    everything = house.add(port=house.port + 5)
    await house.instances(1)
    verdict = house.service.readiness()
    assert not verdict.ready
    assert verdict.reasons == (
        f"denoiser instance {named[DENOISER][0]} (--denoiser-urls) has not registered or is gone",
    )
    late = house.add(DENOISER, port=house.port + 6)
    await house.ready()
    late.crash()
    await until(lambda: bool(house.service.readiness().reasons), "the loss to be noticed")
    verdict = house.service.readiness()
    assert verdict.ready  # another one serves the role
    assert named[DENOISER][0] in verdict.reasons[0]
    everything.crash()
    await until(lambda: not house.service.readiness().ready, "the loss to be noticed")
    house.add(DENOISER, port=house.port + 6)
    house.add(port=house.port + 5)
    await house.ready()
    await until(lambda: not house.service.readiness().reasons, "both to be there again")
    await house.close()
