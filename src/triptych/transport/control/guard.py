"""Who may talk on the sockets of one process: keys on every socket, failed handshakes counted and logged.

Theory of operation. With keys every bound socket is a CURVE server and every connecting one a CURVE client. libzmq
asks for each peer whose key is in order whether it is welcome (ZAP, rfc.zeromq.org/spec/27), at an address inside the
process; the guard's thread answers, so no stranger ever holds up a loop. Peers that fail before that, having no key or
one for another server, are told by a monitor on the socket. The monitors are there without keys, too: so both ends say
it when only one of them was given keys.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from triptych.transport.control.keys import Keys
from triptych.transport.control.sockets import DropCounter

_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FLAG = "--disagg-key-dir"
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_MONITOR_STOPPED
)
_ATTEMPTS = zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
"""A connecting socket closes a connection that it could not make."""

Socket = zmq.Socket[bytes]
Note = Callable[[int, str], None]
"""Takes what a monitor tells: the event, and the endpoint."""


class Guard:
    """Admits peers by key on the sockets of ``context``. With ``keys`` None it only counts failed handshakes.

    `protect_bound` and `protect_connecting` are to be called before the socket is bound or connected, by its owner;
    `close` after all of them are closed.
    """

    def __init__(self, context: zmq.Context[Socket], keys: Keys | None) -> None:
        self._context = context
        self._keys = keys
        self._welcome = z85.decode(keys.peer) if keys else b""
        self._drops = DropCounter()
        self._numbers = itertools.count()
        self._new: deque[tuple[str, Note]] = deque()
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP)
        self._thread = threading.Thread(target=self._run, name="triptych-guard", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Handshakes that failed so far: ``unknown_peer`` on bound sockets, ``handshake`` on connecting ones."""
        return dict(self._drops.counts)

    def protect_bound(self, sock: Socket) -> None:
        """Let only peers with the known key in."""
        if self._keys is not None:
            sock.setsockopt(zmq.CURVE_SERVER, 1)
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            sock.setsockopt(zmq.ZAP_DOMAIN, b"triptych")
        self._watch(sock, _HANDSHAKES, self._note_bound)

    def protect_connecting(self, sock: Socket) -> None:
        """Talk only to a peer with the known key."""
        if self._keys is not None:
            sock.setsockopt(zmq.CURVE_SERVERKEY, self._keys.peer)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)

    def watch_handshakes(self, sock: Socket) -> None:
        """Count what goes wrong with a connecting socket's handshakes."""
        self._watch(sock, _HANDSHAKES, self._note_connecting)

    def watch_attempts(self, sock: Socket, failed: Callable[[], None]) -> None:
        """Have ``failed`` called, on the guard's thread, whenever a connection could not be made."""
        self._watch(sock, _ATTEMPTS, lambda event, where: failed())

    def _watch(self, sock: Socket, events: int, note: Note) -> None:
        name = f"inproc://triptych-monitor-{next(self._numbers)}"
        sock.monitor(name, events)
        self._new.append((name, note))
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End the thread."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            os.close(self._wake_fd)

    # -- on the guard's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._zap, zmq.POLLIN)
        monitors: dict[Socket, Note] = {}
        while not self._closing:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            if self._zap in ready:
                self._admit(self._zap.recv_multipart())
            for monitor in [monitor for monitor in monitors if monitor in ready]:
                if not _hear(monitor, monitors[monitor]):
                    poller.unregister(monitor)
                    monitor.close(linger=0)
                    del monitors[monitor]
            while self._new:
                name, note = self._new.popleft()
                monitor = self._context.socket(zmq.PAIR)
                monitor.connect(name)
                monitors[monitor] = note
                poller.register(monitor, zmq.POLLIN)
        for sock in (*monitors, self._zap):
            sock.close(linger=0)

    def _admit(self, frames: list[bytes]) -> None:
        """Answer libzmq's question about one peer."""
        _, number, _, address, _, mechanism, *credentials = frames
        known = mechanism == b"CURVE" and bool(self._welcome) and credentials == [self._welcome]
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        if not known:
            self._drops.add("unknown_peer", f"{address.decode(errors='replace')} showed a key that is not known here")
        self._zap.send_multipart([_VERSION, number, *status, b"", b""])

    def _note_connecting(self, event: int, where: str) -> None:
        self._drops.add("handshake", f"{where} is no peer of ours, or both were not given the same keys ({_FLAG})")

    def _note_bound(self, event: int, where: str) -> None:
        if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # refused by us, and counted then
            self._drops.add("unknown_peer", f"on {where} a peer came without the right keys ({_FLAG})")


def _hear(monitor: Socket, note: Note) -> bool:
    """Pass on what a monitor tells; whether its socket still lives."""
    told = parse_monitor_message(monitor.recv_multipart())
    event = int(told["event"])
    if event == zmq.EVENT_MONITOR_STOPPED:
        return False
    note(event, bytes(told["endpoint"]).decode(errors="replace"))
    return True
