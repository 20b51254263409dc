"""An instance's end of the control plane: its work port, its membership line, and its pushes of results."""

from __future__ import annotations

import contextlib
import os
import threading

import zmq

from triptych.config import parse_tcp_url
from triptych.errors import ConfigError, WireError
from triptych.ids import Role
from triptych.transport.control.guard import Guard
from triptych.transport.control.keys import Keys
from triptych.transport.control.line import Line
from triptych.transport.control.sockets import (
    MEMBER_HWM,
    MEMBER_MAX_BYTES,
    RESULT_HWM,
    RESULT_MAX_BYTES,
    WORK_HWM,
    WORK_MAX_BYTES,
    Blobs,
    DropCounter,
    bind,
    open_socket,
)
from triptych.wire.codec import decode_to_instance
from triptych.wire.messages import (
    DrainStatus,
    Fetched,
    Finished,
    FromInstance,
    Refused,
    Staged,
    Started,
    ToInstance,
    Unknown,
    Welcome,
)

POLL_LIMIT = 256
"""ZMQ messages taken from each socket in one `InstanceControl.poll`."""
CLOSE_LINGER_MS = 250
"""How long `InstanceControl.close` may take to get the last messages, such as a goodbye, out."""

_SAID_BY_THE_END = (Fetched, Started)
"""Reports of a stage that its end makes needless."""
_OF_MEMBERSHIP = (Welcome, Refused, Unknown, DrainStatus)
"""What only the line to the server's frontend may bring; everything else comes to the work port."""
_WILDCARD_HOSTS = ("0.0.0.0", "*", "::")

Delivery = tuple[ToInstance, tuple[bytes, ...]]


class InstanceControl:
    """Binds the work port at ``bind_host:work_port`` and keeps a line to the server's frontend, ``server_addr``.

    Either side may start first and come back: ZMQ reconnects for ever. Belongs to one thread, except `wake`.
    Nothing but `poll` waits. What cannot be read or sent is counted in `dropped`, never raised.

    With ``keys`` every socket is encrypted, takes work from the server alone, and talks to the server alone.

    Raises `ConfigError` that names the port when it is taken.
    """

    def __init__(self, *, bind_host: str, work_port: int, server_addr: str, keys: Keys | None = None) -> None:
        self._server_host, server_port = parse_tcp_url("disagg-server-addr", server_addr)
        self._context = zmq.Context()
        self._guard = Guard(self._context, keys)
        self._drops = DropCounter()
        self._results: dict[Role, Line] = {}
        self._result_urls: dict[Role, str] = {}
        self._work = open_socket(self._context, zmq.PULL, max_bytes=WORK_MAX_BYTES, hwm=WORK_HWM)
        self._guard.protect_bound(self._work)
        try:
            flag = f"--scheduler-port {work_port} (work)"
            bind(self._work, bind_host, work_port, host_flag="disagg-p2p-hostname", port_flag=flag)
        except ConfigError:
            self._work.close()
            self._guard.close()
            self._context.term()
            raise
        self._member = self._connect(
            zmq.DEALER, self._server_host, server_port, max_bytes=MEMBER_MAX_BYTES, hwm=MEMBER_HWM
        )
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._receivers = {"work": self._work, "member": self._member.sock}
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        for sock in self._receivers.values():
            self._poller.register(sock, zmq.POLLIN)
        self._wake_lock = threading.Lock()
        self._closed = False

    def _connect(self, kind: int, host: str, port: int, *, max_bytes: int, hwm: int) -> Line:
        observe = self._guard.watch_handshakes
        return Line(self._context, self._guard, kind, (host, port), max_bytes=max_bytes, hwm=hwm, observe=observe)

    @property
    def dropped(self) -> dict[str, int]:
        """Drops so far: malformed frames by socket (work, member), undeliverable messages by direction (say, report),
        peers without the right key (unknown_peer), and refusals by what was taken for the server (handshake)."""
        return self._drops.counts | self._guard.counts

    def poll(self, timeout_s: float) -> list[Delivery]:
        """Wait until something arrives, `wake` is called or the time is up; return what arrived, with its blobs."""
        self._poller.poll(max(0, round(timeout_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        arrived: list[Delivery] = []
        for where, sock in self._receivers.items():
            for _ in range(POLL_LIMIT):
                try:
                    frames = sock.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                self._decode(where, frames, arrived)
        return arrived

    def _decode(self, where: str, frames: list[bytes], arrived: list[Delivery]) -> None:
        batch, *blobs = frames
        try:
            messages = decode_to_instance(batch)
            if blobs and len(messages) != 1:
                raise WireError(f"{len(blobs)} raw frames with a batch of {len(messages)} messages")
            for message in messages:
                # Whoever reaches the work port must not be able to say where our results go, or to turn us away.
                if isinstance(message, _OF_MEMBERSHIP) is not (where == "member"):
                    raise WireError(f"a {type(message).__name__} belongs on the other socket")
        except WireError as error:
            self._drops.add(where, error)
            return
        arrived.extend((message, tuple(blobs)) for message in messages)

    def connect_results(self, urls: dict[Role, str]) -> None:
        """Push results to these addresses from now on; what waited for others is discarded.

        A wildcard address, which a server bound to all interfaces may announce, means the host that the frontend
        was reached under. With an address among them that is no ``tcp://host:port`` nothing changes but the count of
        drops.
        """
        try:
            parsed = {role: parse_tcp_url(f"result url of {role}", url) for role, url in urls.items()}
        except ConfigError as error:
            self._drops.add("report", error)
            return
        for role, (host, port) in parsed.items():
            if self._result_urls.get(role) == urls[role]:
                continue
            if role in self._results:
                self._results.pop(role).sock.close()
            host = self._server_host if host in _WILDCARD_HOSTS else host
            try:
                line = self._connect(zmq.PUSH, host, port, max_bytes=RESULT_MAX_BYTES, hwm=RESULT_HWM)
            except zmq.ZMQError as error:
                self._drops.add("report", f"result url of {role}: {urls[role]!r}: {error.strerror}")
            else:
                self._results[role] = line
        for role in self._results.keys() - parsed.keys():
            self._results.pop(role).sock.close()
        self._result_urls = dict(urls)

    def say(self, message: FromInstance) -> None:
        """Queue a membership message to the server's frontend."""
        self._member.outbox.put(message)

    def report(self, role: Role, message: FromInstance, blobs: Blobs = ()) -> None:
        """Queue a report to the result port of ``role``. Before `connect_results` it is a counted drop: outcomes
        are resent until acknowledged.

        The end of a stage takes the place of its start where that has not left yet."""
        if role in self._results:
            outbox = self._results[role].outbox
            if isinstance(message, Staged | Finished):
                lease = message.lease
                outbox.take_back(lambda queued: isinstance(queued, _SAID_BY_THE_END) and queued.lease == lease)
            outbox.put(message, blobs)
        else:
            self._drops.add("report", f"the server has not told its {role} result port")

    def flush(self) -> None:
        """Send everything that is queued, without waiting."""
        self._member.flush("say", self._drops)
        for line in self._results.values():
            line.flush("report", self._drops)

    def wake(self) -> None:
        """Make `poll` return now. Safe from any thread, and harmless after `close`."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Flush, give the last messages a quarter of a second to leave, and close every socket."""
        with self._wake_lock:  # a late wake must not write to whatever gets this descriptor's number next
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        self.flush()
        self._work.close()
        for line in (self._member, *self._results.values()):
            line.sock.close(linger=CLOSE_LINGER_MS)
        self._guard.close()
        self._context.term()
