"""The server's sockets: what comes in, what goes out, and what hostile or absent peers can and cannot do."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import zmq

from triptych.errors import ConfigError
from triptych.ids import ROLES, Epoch, InstanceId, RequestId, Role
from triptych.launch.ports import free_ports
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.server import Inbound, ServerControl
from triptych.transport.control.sockets import ANSWER_HWM
from triptych.wire.codec import encode_batch
from triptych.wire.messages import Ack, FromInstance, Heartbeat, Lease, Progress, Started, ToInstance, Unknown

Server = tuple[ServerControl, int]
Join = Callable[..., tuple[InstanceControl, str]]

HOST = "127.0.0.1"
LEASE = Lease(RequestId("r"), Role.DENOISER, 0)
UNKNOWN = Unknown(server_epoch=Epoch("s"), epoch=Epoch("e"))
WAIT = 60.0


def heartbeat(sequence: int = 0, instance: str = "i") -> Heartbeat:
    return Heartbeat(
        instance=InstanceId(instance),
        epoch=Epoch("e"),
        server_epoch=None,
        sequence=sequence,
        leases=(),
        pool_used=0,
        resident_bytes=0,
    )


def progress(step: int) -> Progress:
    return Progress(instance=InstanceId("i"), epoch=Epoch("e"), server_epoch=None, lease=LEASE, step=step, steps=9)


def ack(number: int) -> Ack:
    return Ack(server_epoch=Epoch("s"), epoch=Epoch("e"), leases=(Lease(RequestId(str(number)), Role.DECODER, 0),))


def result_urls(port: int, host: str = HOST) -> dict[Role, str]:
    return {role: f"tcp://{host}:{port + 1 + index}" for index, role in enumerate(ROLES)}


def receive(server: ServerControl, count: int) -> list[Inbound]:
    got: list[Inbound] = []
    deadline = time.monotonic() + WAIT
    while len(got) < count and time.monotonic() < deadline:
        got += server.receive()
    assert len(got) == count
    return got


def poll(instance: InstanceControl, count: int) -> list[tuple[ToInstance, tuple[bytes, ...]]]:
    got: list[tuple[ToInstance, tuple[bytes, ...]]] = []
    deadline = time.monotonic() + WAIT
    while len(got) < count and time.monotonic() < deadline:
        got += instance.poll(0.2)
    assert len(got) == count
    return got


def until_dropped(server: ServerControl, where: str, count: int) -> None:
    deadline = time.monotonic() + WAIT
    while server.dropped.get(where, 0) < count and time.monotonic() < deadline:
        assert server.receive() == []
    assert server.dropped[where] == count


def test_messages_go_both_ways_in_order_and_with_their_blobs(server: Server, join: Join) -> None:
    control, port = server
    instance, work_url = join(port)
    instance.say(heartbeat(0))
    instance.say(heartbeat(1))
    instance.flush()
    assert [inbound.message for inbound in receive(control, 2)] == [heartbeat(0), heartbeat(1)]

    control.send_member(InstanceId("i"), UNKNOWN)
    control.send_work(work_url, ack(0))
    control.send_work(work_url, ack(1), [b"picture", memoryview(b"other")])
    control.send_work(work_url, ack(2))
    control.flush()
    got = poll(instance, 4)
    assert (UNKNOWN, ()) in got
    got.remove((UNKNOWN, ()))
    assert got == [(ack(0), ()), (ack(1), (b"picture", b"other")), (ack(2), ())]

    instance.connect_results(result_urls(port))
    movie = bytes(3_000_000)
    instance.report(Role.DENOISER, progress(1))
    instance.report(Role.DENOISER, progress(2), [movie])
    instance.report(Role.DENOISER, progress(3))
    instance.flush()
    reports = receive(control, 3)
    assert [report.message for report in reports] == [progress(1), progress(2), progress(3)]
    assert [report.blobs for report in reports] == [(), (movie,), ()]
    assert control.dropped == {}
    assert instance.dropped == {}


def test_each_role_reports_to_its_own_port(server: Server, join: Join) -> None:
    control, port = server
    instance, _ = join(port)
    instance.connect_results(result_urls(port))
    for role in ROLES:
        lease = Lease(RequestId("r"), role, 0)
        started = Started(instance=InstanceId("i"), epoch=Epoch("e"), server_epoch=None, lease=lease)
        instance.report(role, started)
        instance.flush()
        assert receive(control, 1)[0].message == started


@pytest.mark.parametrize("offset", range(4))
def test_a_busy_port_is_named_and_nothing_stays_bound(offset: int) -> None:
    port = free_ports(7)[3]
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier test may still fade
        taken.bind((HOST, port))
        taken.listen()
        base = port - offset
        with pytest.raises(ConfigError, match=rf"--scheduler-port {base}.*port {port} is already in use"):
            ServerControl(HOST, base)
        for other in set(range(base, base + 4)) - {port}:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, other))


def test_a_host_that_is_not_ours_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"host='192\.0\.2\.1'"):
        ServerControl("192.0.2.1", 25000)


def test_the_server_may_be_reached_as_localhost(server: Server, join: Join) -> None:
    control, port = server
    instance, work_url = join(port, host="localhost")
    instance.say(heartbeat())
    instance.flush()
    receive(control, 1)
    control.send_work(work_url.replace(HOST, "localhost"), ack(0))
    control.flush()
    control.send_work(work_url, ack(1))
    control.flush()
    assert sorted(message.leases[0].request for message, _ in poll(instance, 2)) == ["0", "1"]


def test_results_to_a_wildcard_address_go_to_the_server_that_was_joined(server: Server, join: Join) -> None:
    control, port = server
    instance, _ = join(port)
    instance.connect_results(result_urls(port, host="0.0.0.0"))
    instance.report(Role.DECODER, progress(1))
    instance.flush()
    receive(control, 1)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b""], "empty"),
        ([b"\xc1"], "not MessagePack"),
        ([b"\x80\x04K*."], "a pickle"),
        ([encode_batch([UNKNOWN])], "a message of the other direction"),
        ([encode_batch([heartbeat(), heartbeat()]), b"blob"], "a blob that belongs to no message"),
        ([encode_batch([]), b"blob"], "a blob without a message"),
        ([b"\x91" * 100_000], "endless nesting"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("where", ["frontend", "decoder"])
def test_a_malformed_frame_costs_one_counted_drop(
    server: Server, join: Join, where: str, frames: list[bytes], why: str
) -> None:
    control, port = server
    context = zmq.Context()
    hostile = context.socket(zmq.DEALER if where == "frontend" else zmq.PUSH)
    hostile.connect(f"tcp://{HOST}:{port if where == 'frontend' else port + 3}")
    hostile.send_multipart(frames)
    until_dropped(control, where, 1)
    hostile.send_multipart([encode_batch([heartbeat(7)])])
    assert receive(control, 1)[0].message == heartbeat(7)
    context.destroy(linger=0)


def test_a_flood_of_malformed_frames_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    control, port = server
    context = zmq.Context()
    hostile = context.socket(zmq.PUSH)
    hostile.connect(f"tcp://{HOST}:{port + 1}")
    with caplog.at_level(logging.WARNING):
        for _ in range(500):
            hostile.send(b"\xc1")
        until_dropped(control, "encoder", 500)
    assert len(caplog.records) == 1
    assert "encoder" in caplog.text
    context.destroy(linger=0)


def test_bytes_that_are_not_zmq_do_no_harm(server: Server, join: Join) -> None:
    control, port = server
    for offset in range(4):
        with socket.create_connection((HOST, port + offset)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
    instance, _ = join(port)
    instance.say(heartbeat())
    instance.flush()
    assert receive(control, 1)[0].message == heartbeat()


def test_a_frame_beyond_the_limit_ends_the_connection_not_the_server(server: Server, join: Join) -> None:
    control, port = server
    context = zmq.Context()
    hostile = context.socket(zmq.DEALER)
    monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    hostile.connect(f"tcp://{HOST}:{port}")
    hostile.send(bytes(65 << 20))
    assert monitor.poll(WAIT * 1000)
    assert control.receive() == []
    hostile.disable_monitor()
    context.destroy(linger=0)
    instance, _ = join(port)
    instance.say(heartbeat())
    instance.flush()
    receive(control, 1)


def test_an_answer_goes_to_where_the_instance_was_last_heard(server: Server, join: Join) -> None:
    control, port = server
    old, _ = join(port)
    old.say(heartbeat(0))
    old.flush()
    receive(control, 1)
    new, _ = join(port)
    new.say(heartbeat(1))
    new.flush()
    receive(control, 1)
    control.send_member(InstanceId("i"), UNKNOWN)
    control.flush()
    assert poll(new, 1) == [(UNKNOWN, ())]
    assert old.poll(0) == []


def test_an_answer_to_a_member_that_is_unknown_or_gone_is_a_counted_drop(server: Server, join: Join) -> None:
    control, port = server
    control.send_member(InstanceId("nobody"), UNKNOWN)
    assert control.dropped == {"send_member": 1}
    instance, _ = join(port)
    instance.say(heartbeat())
    instance.flush()
    receive(control, 1)
    instance.close()
    deadline = time.monotonic() + WAIT
    while control.dropped["send_member"] == 1 and time.monotonic() < deadline:
        control.send_member(InstanceId("i"), UNKNOWN)
        control.flush()
        control.receive()
    assert control.dropped["send_member"] >= 2


def test_connections_under_one_routing_id_displace_each_other(server: Server) -> None:
    """Symptom: libzmq kept a second one unread for ever, and memory grew with each connection of a stranger."""
    control, port = server
    with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for number, sock in enumerate((first, second)):
            sock.routing_id = b"twin"
            sock.linger = 0
            sock.connect(f"tcp://{HOST}:{port}")
            sock.send(encode_batch([heartbeat(number)]))
            (arrived,) = receive(control, 1)
            assert arrived.message == heartbeat(number)
        control.send_member(InstanceId("i"), UNKNOWN)
        control.flush()
        assert second.poll(WAIT * 1000)


def test_a_member_that_asks_without_end_gets_so_many_answers_at_once(server: Server, join: Join) -> None:
    control, port = server
    instance, _ = join(port)
    instance.say(heartbeat())
    instance.flush()
    receive(control, 1)
    for _ in range(500):
        control.send_member(InstanceId("i"), UNKNOWN)
    control.flush()
    assert control.dropped == {"send_member": 500 - ANSWER_HWM}


def test_work_for_a_dead_peer_is_bounded_and_never_blocks(server: Server, free_port: Callable[[], int]) -> None:
    control, _ = server
    url = f"tcp://{HOST}:{free_port()}"
    for number in range(3000):
        control.send_work(url, ack(number))
        control.flush()
    assert control.dropped["send_work"] >= 1000
    control.disconnect(url)
    control.disconnect(url)
    control.disconnect("tcp://never:1")
    control.flush()


def test_work_sent_before_the_instance_starts_arrives_when_it_does(
    server: Server, free_port: Callable[[], int]
) -> None:
    control, port = server
    work_port = free_port()
    control.send_work(f"tcp://{HOST}:{work_port}", ack(1))
    control.flush()
    instance = InstanceControl(bind_host=HOST, work_port=work_port, server_addr=f"tcp://{HOST}:{port}")
    assert poll(instance, 1) == [(ack(1), ())]
    instance.close()


@pytest.mark.parametrize("url", ["", "tcp://", "ipc:///tmp/x", "inproc://x", "tcp://host:0", "tcp://host:99999"])
def test_a_work_url_that_is_none_is_a_counted_drop(server: Server, url: str) -> None:
    control, _ = server
    control.send_work(url, ack(0))
    control.flush()
    assert control.dropped == {"send_work": 1}


async def test_the_event_loop_hears_of_every_message(server: Server, join: Join) -> None:
    control, port = server
    instance, work_url = join(port)
    instance.connect_results(result_urls(port))
    heard: list[FromInstance] = []
    done = asyncio.Event()
    total = 2000

    def readable() -> None:
        for inbound in control.receive():
            heard.append(inbound.message)
            control.send_member(InstanceId("i"), UNKNOWN)  # sending may swallow the notice of more to read
            control.send_work(work_url, ack(0))
        control.flush()
        if len(heard) >= total:
            done.set()

    control.attach(asyncio.get_running_loop(), readable, gone=print)

    def talk() -> None:
        for number in range(total // 2):
            instance.say(heartbeat(number))
            instance.report(Role.ENCODER, progress(number))
            instance.flush()
            instance.poll(0)
            while len(heard) < 2 * number - 50 and not done.is_set():  # never more than the queues hold
                instance.poll(0.001)

    talking = asyncio.get_running_loop().run_in_executor(None, talk)
    await asyncio.wait_for(done.wait(), WAIT)
    await talking
    assert [m.sequence for m in heard if isinstance(m, Heartbeat)] == list(range(total // 2))
    assert [m.step for m in heard if isinstance(m, Progress)] == list(range(total // 2))
    control.close()


async def test_the_event_loop_hears_of_what_came_before_it_was_attached(server: Server, join: Join) -> None:
    control, port = server
    instance, _ = join(port)
    instance.say(heartbeat(0))
    instance.flush()
    receive(control, 1)
    for number in range(1, 4):
        instance.say(heartbeat(number))
        instance.flush()
    heard = asyncio.Event()
    seen: list[Inbound] = []

    def readable() -> None:
        seen.extend(control.receive())
        if len(seen) == 3:
            heard.set()

    control.attach(asyncio.get_running_loop(), readable, gone=print)
    await asyncio.wait_for(heard.wait(), WAIT)
    control.close()


def test_the_control_plane_needs_no_torch() -> None:
    code = (
        "import sys, triptych.transport.control.server, triptych.transport.control.instance, triptych.transport.host;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
