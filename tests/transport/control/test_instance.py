"""An instance's sockets: start order, restarts of the server, waking, and what is dropped."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from triptych.errors import ConfigError
from triptych.ids import ROLES, Epoch, InstanceId, RequestId, Role
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.server import Inbound, ServerControl
from triptych.wire.codec import encode_batch
from triptych.wire.messages import Ack, Fetched, Goodbye, Lease, Staged, Started, Unknown, replace

HOST = "127.0.0.1"
WAIT = 60.0
UNKNOWN = Unknown(server_epoch=Epoch("s"), epoch=Epoch("e"))
ACK = Ack(server_epoch=Epoch("s"), epoch=Epoch("e"), leases=())
GOODBYE = Goodbye(instance=InstanceId("i"), epoch=Epoch("e"), server_epoch=None, reason="stopped")
STARTED = Started(
    instance=InstanceId("i"), epoch=Epoch("e"), server_epoch=None, lease=Lease(RequestId("r"), Role.ENCODER, 0)
)

Server = tuple[ServerControl, int]
Join = Callable[..., tuple[InstanceControl, str]]


def receive(server: ServerControl, count: int = 1) -> list[Inbound]:
    got: list[Inbound] = []
    deadline = time.monotonic() + WAIT
    while len(got) < count and time.monotonic() < deadline:
        got += server.receive()
    return got


def test_a_busy_work_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--scheduler-port {port} \(work\): port {port} is already in use"):
            InstanceControl(bind_host=HOST, work_port=port, server_addr=f"tcp://{HOST}:1")


@pytest.mark.parametrize(
    "addr", ["127.0.0.1:5555", "tcp://127.0.0.1", "http://127.0.0.1:5555", "tcp://[::1:5555", "tcp://h:x"]
)
def test_a_server_address_that_is_none_is_named(addr: str, free_port: Callable[[], int]) -> None:
    with pytest.raises(ConfigError, match="disagg-server-addr"):
        InstanceControl(bind_host=HOST, work_port=free_port(), server_addr=addr)


def test_what_is_said_before_the_server_starts_arrives_when_it_does(join: Join, server: Server) -> None:
    control, port = server
    control.close()
    instance, _ = join(port)
    instance.say(GOODBYE)
    instance.flush()
    late = ServerControl(HOST, port)
    assert [inbound.message for inbound in receive(late)] == [GOODBYE]
    late.close()


def test_a_stage_that_ends_before_its_start_was_told_is_told_once(join: Join, server: Server) -> None:
    control, port = server
    instance, _ = join(port)
    instance.connect_results({role: f"tcp://{HOST}:{port + 1 + n}" for n, role in enumerate(ROLES)})
    other = replace(STARTED, lease=Lease(RequestId("other"), Role.ENCODER, 0))
    staged = Staged(
        instance=STARTED.instance, epoch=STARTED.epoch, server_epoch=None, lease=STARTED.lease, outputs=(),
        compute_seconds=0.0, stage_seconds=0.0,
    )  # fmt: skip
    fetched = Fetched(
        instance=STARTED.instance, epoch=STARTED.epoch, server_epoch=None, lease=STARTED.lease, seconds=0.0, nbytes=0,
        plane="local",
    )  # fmt: skip
    for message in (other, fetched, STARTED, staged):
        instance.report(Role.ENCODER, message)
    instance.flush()
    assert [inbound.message for inbound in receive(control, 2)] == [other, staged]
    instance.report(Role.ENCODER, STARTED)
    instance.flush()
    instance.report(Role.ENCODER, staged)
    instance.flush()
    assert [inbound.message for inbound in receive(control, 2)] == [STARTED, staged]


def test_a_server_that_comes_back_is_found_again(join: Join, server: Server) -> None:
    control, port = server
    instance, _ = join(port)
    instance.connect_results({role: f"tcp://{HOST}:{port + 1 + n}" for n, role in enumerate(ROLES)})
    instance.say(STARTED)
    instance.flush()
    assert receive(control)
    control.close()
    again = ServerControl(HOST, port)
    instance.say(GOODBYE)
    instance.report(Role.ENCODER, STARTED)
    instance.flush()
    assert {type(inbound.message) for inbound in receive(again, 2)} == {Goodbye, Started}
    again.send_member(InstanceId("i"), UNKNOWN)
    again.close()


def test_new_result_addresses_replace_the_old(join: Join, server: Server, free_port: Callable[[], int]) -> None:
    control, port = server
    instance, _ = join(port)
    instance.connect_results(dict.fromkeys(ROLES, f"tcp://{HOST}:{free_port()}"))
    instance.connect_results({Role.ENCODER: f"tcp://{HOST}:{port + 1}"})
    instance.report(Role.ENCODER, STARTED)
    instance.report(Role.DECODER, STARTED)
    instance.flush()
    assert [inbound.message for inbound in receive(control)] == [STARTED]
    assert instance.dropped == {"report": 1}


def test_a_report_before_the_welcome_is_a_counted_drop(join: Join, free_port: Callable[[], int]) -> None:
    instance, _ = join(free_port())
    instance.report(Role.ENCODER, STARTED)
    instance.flush()
    assert instance.dropped == {"report": 1}


def test_a_result_address_that_is_none_is_a_counted_drop_and_changes_nothing(join: Join, server: Server) -> None:
    control, port = server
    instance, _ = join(port)
    instance.connect_results({Role.ENCODER: f"tcp://{HOST}:{port + 1}"})
    for url in ("local", "tcp://[::1", "tcp://h:0", "tcp://h:x", ""):
        instance.connect_results({Role.ENCODER: url})
    assert instance.dropped == {"report": 5}
    instance.report(Role.ENCODER, STARTED)
    instance.flush()
    assert [inbound.message for inbound in receive(control)] == [STARTED]


def test_talking_to_a_server_that_never_comes_is_bounded_and_never_blocks(
    join: Join, free_port: Callable[[], int]
) -> None:
    instance, _ = join(free_port())
    for _ in range(2000):
        instance.say(STARTED)
        instance.flush()
    assert instance.dropped["say"] >= 1000


def test_poll_waits_no_longer_than_asked(join: Join, free_port: Callable[[], int]) -> None:
    instance, _ = join(free_port())
    started = time.monotonic()
    assert instance.poll(0.05) == []
    assert 0.04 < time.monotonic() - started < WAIT
    assert instance.poll(0) == []


def test_another_thread_can_wake_the_control_thread(join: Join, free_port: Callable[[], int]) -> None:
    instance, _ = join(free_port())
    started = time.monotonic()
    threading.Timer(0.05, instance.wake).start()
    assert instance.poll(2 * WAIT) == []
    assert time.monotonic() - started < WAIT
    instance.wake()
    instance.wake()
    assert instance.poll(2 * WAIT) == []
    assert instance.poll(0) == []


def test_waking_a_closed_control_does_no_harm(join: Join, free_port: Callable[[], int]) -> None:
    instance, _ = join(free_port())
    instance.close()
    instance.close()
    instance.wake()


def test_a_malformed_frame_of_work_is_a_counted_drop(join: Join, free_port: Callable[[], int]) -> None:
    instance, work_url = join(free_port())
    context = zmq.Context()
    hostile = context.socket(zmq.PUSH)
    hostile.connect(work_url)
    for frames in (
        [b"\xc1"],
        [encode_batch([GOODBYE])],
        [encode_batch([ACK, ACK]), b"blob"],
        [encode_batch([UNKNOWN])],
    ):
        hostile.send_multipart(frames)
    hostile.send_multipart([encode_batch([ACK])])
    got = []
    deadline = time.monotonic() + WAIT
    while not got and time.monotonic() < deadline:
        got = instance.poll(0.2)
    assert got == [(ACK, ())]
    assert instance.dropped == {"work": 4}
    context.destroy(linger=0)


def test_the_last_words_leave_before_the_sockets_close(join: Join, server: Server) -> None:
    control, port = server
    instance, _ = join(port)
    instance.say(STARTED)
    instance.flush()
    assert receive(control)
    instance.say(GOODBYE)
    instance.close()
    assert [inbound.message for inbound in receive(control)] == [GOODBYE]
