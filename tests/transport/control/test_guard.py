"""Keys on the sockets: who gets in, who does not, what is counted, and how a peer is found again after a stranger."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from triptych.ids import ROLES, Epoch, InstanceId, RequestId, Role
from triptych.launch.ports import free_ports
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.keys import Keys, load_keys, make_keys
from triptych.transport.control.server import Inbound, ServerControl
from triptych.wire.codec import encode_batch
from triptych.wire.messages import Ack, Goodbye, Lease, Started, ToInstance, Unknown

HOST = "127.0.0.1"
WAIT = 60.0
UNKNOWN = Unknown(server_epoch=Epoch("s"), epoch=Epoch("e"))
ACK = Ack(server_epoch=Epoch("s"), epoch=Epoch("e"), leases=())
GOODBYE = Goodbye(instance=InstanceId("i"), epoch=Epoch("e"), server_epoch=None, reason="a secret word")
STARTED = Started(
    instance=InstanceId("i"), epoch=Epoch("e"), server_epoch=None, lease=Lease(RequestId("r"), Role.ENCODER, 0)
)

Delivery = tuple[ToInstance, tuple[bytes, ...]]


class House:
    """A server and an instance, their keys, and strangers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        make_keys(folder)
        self.server_keys = load_keys(folder, "server")
        self.instance_keys = load_keys(folder, "instance")
        self.port, *_, self.work_port = free_ports(5)
        self.work_url = f"tcp://{HOST}:{self.work_port}"
        self._stack = stack
        self._context = zmq.Context()
        stack.callback(self._context.destroy, linger=0)

    def server(self, keys: Keys | None) -> ServerControl:
        return self._stack.enter_context(closing(ServerControl(HOST, self.port, keys=keys)))

    def instance(self, keys: Keys | None, port: int | None = None, work_port: int | None = None) -> InstanceControl:
        control = InstanceControl(
            bind_host=HOST,
            work_port=work_port or self.work_port,
            server_addr=f"tcp://{HOST}:{port or self.port}",
            keys=keys,
        )
        return self._stack.enter_context(closing(control))

    def stranger(self, kind: int, port: int, keys: Keys | None) -> zmq.Socket[bytes]:
        """A hostile socket connected to ``port``: with ``keys``, or with none."""
        sock = self._context.socket(kind)
        if keys is not None:
            sock.curve_publickey, sock.curve_secretkey, sock.curve_serverkey = keys.public, keys.secret, keys.peer
        self._stack.callback(sock.close, linger=0)
        sock.connect(f"tcp://{HOST}:{port}")
        return sock

    def unknown_keys(self, server: bytes) -> Keys:
        """A pair that nobody knows, of somebody who has found out the public key of what he connects to."""
        public, secret = zmq.curve_keypair()
        return Keys(public=public, secret=secret, peer=server)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(tmp_path / "keys", stack)


def until(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {WAIT:.0f} s in vain for {what}"
    return found


def hear(server: ServerControl, instance: InstanceControl) -> None:
    """Let the instance say goodbye, again and again, until the server hears it, and nothing else."""

    def look() -> list[Inbound]:
        instance.say(GOODBYE)
        instance.flush()
        instance.poll(0.05)
        return server.receive()

    assert {inbound.message.reason for inbound in until(look, "the instance to be heard")} == {GOODBYE.reason}


def polled(instance: InstanceControl) -> list[Delivery]:
    return until(lambda: instance.poll(0.05), "something for the instance")


def test_with_keys_everything_goes_both_ways(house: House) -> None:
    server, instance = house.server(house.server_keys), house.instance(house.instance_keys)
    instance.connect_results({role: f"tcp://{HOST}:{house.port + 1 + n}" for n, role in enumerate(ROLES)})
    instance.say(STARTED)
    instance.flush()
    until(server.receive, "the instance's word")
    server.send_member(InstanceId("i"), UNKNOWN)
    server.flush()
    assert polled(instance) == [(UNKNOWN, ())]
    for role in ROLES:
        instance.report(role, GOODBYE, (b"film",))
        instance.flush()
        assert until(server.receive, f"a result of {role}") == [Inbound(message=GOODBYE, blobs=(b"film",))]
    server.send_work(house.work_url, ACK, (b"picture",))
    server.flush()
    assert polled(instance) == [(ACK, (b"picture",))]
    assert server.dropped == {}
    assert instance.dropped == {}


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("with_key", [False, True])
def test_a_stranger_is_not_heard_by_the_server_and_is_counted(house: House, offset: int, with_key: bool) -> None:
    server, instance = house.server(house.server_keys), house.instance(house.instance_keys)
    keys = house.unknown_keys(house.server_keys.public) if with_key else None
    stranger = house.stranger(zmq.DEALER if offset == 0 else zmq.PUSH, house.port + offset, keys)
    stranger.send_multipart([encode_batch([STARTED])])
    until(lambda: server.dropped.get("unknown_peer"), "the stranger to be counted")
    hear(server, instance)
    assert set(server.dropped) == {"unknown_peer"}


@pytest.mark.parametrize("who", ["no key", "unknown key", "another instance"])
def test_only_the_server_gives_an_instance_work(house: House, who: str) -> None:
    server, instance = house.server(house.server_keys), house.instance(house.instance_keys)
    match who:
        case "no key":
            keys = None
        case "unknown key":
            keys = house.unknown_keys(house.instance_keys.public)
        case _:
            mine = house.instance_keys
            keys = Keys(public=mine.public, secret=mine.secret, peer=mine.public)
    stranger = house.stranger(zmq.PUSH, house.work_port, keys)
    stranger.send_multipart([encode_batch([ACK]), b"from a stranger"])
    until(lambda: instance.dropped.get("unknown_peer"), "the stranger to be counted")
    server.send_work(house.work_url, ACK)
    server.flush()
    assert polled(instance) == [(ACK, ())]


def test_an_instance_tells_an_impostor_nothing(house: House, tmp_path: Path) -> None:
    make_keys(tmp_path / "others")
    impostor, instance = house.server(load_keys(tmp_path / "others", "server")), house.instance(house.instance_keys)

    def refused() -> bool:
        instance.say(GOODBYE)
        instance.flush()
        assert impostor.receive() == []
        return bool(instance.dropped.get("handshake") and impostor.dropped.get("unknown_peer"))

    until(refused, "both ends to notice")
    impostor.close()
    hear(house.server(house.server_keys), instance)


@pytest.mark.parametrize("server_first_with_keys", [True, False])
def test_when_only_one_end_has_keys_both_say_so_and_find_each_other_once_that_is_mended(
    house: House, server_first_with_keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, later = (house.server_keys, None) if server_first_with_keys else (None, house.server_keys)
    server, instance = house.server(first), house.instance(house.instance_keys if first is None else None)

    def both_know() -> bool:
        instance.say(GOODBYE)
        instance.flush()
        assert server.receive() == []
        return bool(instance.dropped.get("handshake") and server.dropped.get("unknown_peer"))

    until(both_know, "both ends to notice")
    until(lambda: caplog.text.count("--disagg-key-dir") == 2, "both to say so")  # which they count first
    server.close()
    hear(house.server(later), instance)


def test_a_stranger_that_had_the_servers_port_for_a_while_keeps_no_instance_away(house: House) -> None:
    answered = threading.Event()
    with socket.create_server((HOST, house.port)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" * 3)
                answered.set()
                connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        instance = house.instance(None)
        assert answered.wait(WAIT)
        until(lambda: instance.dropped.get("handshake"), "the instance to notice")
    thread.join(WAIT)
    hear(house.server(None), instance)


@pytest.mark.parametrize("with_keys", [False, True])
def test_on_the_wire_nothing_can_be_read_with_keys(house: House, with_keys: bool) -> None:
    server = house.server(house.server_keys if with_keys else None)
    seen = bytearray()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other direction's end
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server((HOST, 0)) as listener:
        instance = house.instance(house.instance_keys if with_keys else None, port=listener.getsockname()[1])
        ours, _ = listener.accept()
    with ours, socket.create_connection((HOST, house.port)) as theirs:
        threads = [threading.Thread(target=pump, args=pair) for pair in ((ours, theirs), (theirs, ours))]
        for thread in threads:
            thread.start()
        hear(server, instance)
        instance.close()
        for thread in threads:
            thread.join(WAIT)
    assert (b"a secret word" in seen) is not with_keys


def test_no_thread_stays_behind(house: House) -> None:
    before = set(threading.enumerate())
    server, instance = house.server(house.server_keys), house.instance(house.instance_keys)
    hear(server, instance)
    instance.close()
    server.close()
    assert set(threading.enumerate()) <= before


def test_a_storm_of_strangers_does_not_keep_the_known_away(house: House) -> None:
    server = house.server(house.server_keys)
    for number in range(200):
        keys = house.unknown_keys(house.server_keys.public) if number % 2 else None
        house.stranger(zmq.DEALER, house.port, keys).send(b"let me in")
    until(lambda: server.dropped.get("unknown_peer", 0) >= 200, "all of them to be counted")
    hear(server, house.instance(house.instance_keys))
    assert set(server.dropped) == {"unknown_peer"}
