"""What every socket of the control plane has in common: limits, keepalive, binding, counted drops, batching."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence

import zmq

from triptych.config import tcp_url
from triptych.errors import ConfigError
from triptych.wire.codec import encode_batch
from triptych.wire.messages import FromInstance, ToInstance

MIB = 1 << 20
MEMBER_MAX_BYTES = 64 * MIB
"""Largest frame on the membership sockets: hellos and heartbeats."""
RESULT_MAX_BYTES = 1024 * MIB
"""Largest frame on the result sockets: a finished media file."""
WORK_MAX_BYTES = 256 * MIB
"""Largest frame on a work socket: an uploaded image."""
BATCH_MESSAGES = 512
"""Most messages in one batch frame."""
MEMBER_HWM = 256
"""ZMQ messages of an instance to the frontend that wait to leave before further ones are dropped."""
FRONTEND_HWM = 64
"""ZMQ messages of one peer that wait at the frontend to be read before the peer has to wait."""
ANSWER_HWM = 16
"""ZMQ messages that wait for one member before further ones are dropped, and answers in each of them: who does not read
them, as strangers do not, costs little memory, and members ask again."""
RESULT_HWM = 1024
WORK_HWM = 1024

_SILENCE_MS = 5000
_LOG_INTERVAL = 10.0

_log = logging.getLogger(__name__)

Blobs = Sequence[bytes | memoryview]


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, *, max_bytes: int, hwm: int) -> zmq.Socket[bytes]:
    """A socket that never blocks on close, bounds its queues and frames, and notices half-open connections."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    sock.setsockopt(zmq.SNDHWM, hwm)
    sock.setsockopt(zmq.RCVHWM, hwm)
    # A peer whose machine vanished sends no FIN: TCP's own probes end the connection. Not ZMQ's pings (HEARTBEAT_IVL):
    # libzmq aborts the process when one is due to a peer that has closed while its messages wait to be read
    # (zeromq/libzmq#4364).
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 2)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, 3000)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _SILENCE_MS)
    return sock


def bind(sock: zmq.Socket[bytes], host: str, port: int, *, host_flag: str, port_flag: str) -> None:
    """Bind ``host:port`` or raise `ConfigError` that names the port and the flag that chose it."""
    try:
        address = "0.0.0.0" if host == "*" else _look_up(host, port)
    except OSError as error:
        raise ConfigError(f"{host_flag}={host!r}: not an address of this machine ({error})") from error
    if ":" in address:
        sock.setsockopt(zmq.IPV6, 1)
    try:
        sock.bind(tcp_url(address, port))
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise ConfigError(f"{host_flag}={host!r}: not an address of this machine") from error
        reason = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
        raise ConfigError(f"{port_flag}: port {port} {reason} on {host}") from error


def _look_up(host: str, port: int) -> str:
    """The address of a host; of one that has several an IPv4 address, since `connect` takes names for these."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def connect(sock: zmq.Socket[bytes], host: str, port: int) -> None:
    """Connect to ``host:port``; ZMQ retries for ever. Raises `zmq.ZMQError` for an address it cannot parse."""
    if ":" in host:
        sock.setsockopt(zmq.IPV6, 1)
    # What the peer does not confirm for so long ends the connection, too. Only here: the kernel tells the peer nothing,
    # and strangers who do not read their answers, cut off where they are accepted, would stand still for minutes.
    sock.setsockopt(zmq.TCP_MAXRT, _SILENCE_MS)
    sock.connect(tcp_url(host, port))


def disconnect(sock: zmq.Socket[bytes], host: str, port: int) -> None:
    """Give up a connection to ``host:port``, if ZMQ has not done so itself."""
    with contextlib.suppress(zmq.ZMQError):
        sock.disconnect(tcp_url(host, port))


class DropCounter:
    """Counts what was dropped, by where, and says so in the log at most once in ten seconds each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._said: dict[str, tuple[float, int]] = {}

    def add(self, where: str, reason: object) -> None:
        """One more drop at ``where``."""
        count = self.counts[where] = self.counts.get(where, 0) + 1
        now = time.monotonic()
        last, said = self._said.get(where, (-_LOG_INTERVAL, 0))
        if now - last >= _LOG_INTERVAL:
            self._said[where] = (now, count)
            _log.warning("dropped %d message(s) at %s, the last because: %s", count - said, where, reason)


class Outbox:
    """What waits for one peer: runs of small messages become one batch frame, messages with blobs travel alone."""

    def __init__(self) -> None:
        self._runs: list[tuple[list[FromInstance] | list[ToInstance], Blobs]] = []

    def __len__(self) -> int:
        return sum(len(messages) for messages, _ in self._runs)

    def put(self, message: FromInstance | ToInstance, blobs: Blobs = ()) -> None:
        """Queue a message behind those that are queued already."""
        if blobs or not self._runs or self._runs[-1][1] or len(self._runs[-1][0]) >= BATCH_MESSAGES:
            self._runs.append(([message], blobs))  # type: ignore[list-item]
        else:
            self._runs[-1][0].append(message)  # type: ignore[arg-type]

    def take_back(self, needless: Callable[[FromInstance | ToInstance], bool]) -> None:
        """Unqueue the messages put last, as long as they are needless."""
        while self._runs and not self._runs[-1][1] and needless(self._runs[-1][0][-1]):
            self._runs[-1][0].pop()
            if not self._runs[-1][0]:
                self._runs.pop()

    def flush(self, sock: zmq.Socket[bytes], prefix: Sequence[bytes], where: str, drops: DropCounter) -> bool:
        """Send everything without ever blocking; what the peer has no room for is a counted drop. Whether all went."""
        runs, self._runs = self._runs, []
        sent = True
        for messages, blobs in runs:
            frames = [*prefix, encode_batch(messages), *blobs]
            try:
                # Blobs are not copied: a file that is resent to an unreachable peer is held in memory once.
                sock.send_multipart(frames, zmq.DONTWAIT, copy=not blobs)
            except zmq.ZMQError as error:
                drops.add(where, error.strerror)
                sent = False
        return sent
