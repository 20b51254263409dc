"""A connecting socket of the control plane, what waits to be sent on it, and its way back when libzmq gave it up."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from triptych.transport.control.guard import Guard
from triptych.transport.control.sockets import DropCounter, Outbox, connect, disconnect, open_socket

_RENEW_SECONDS = 1.0


class Line:
    """A connection to ``address``, host and port, that never blocks. ``observe`` gets the socket before it connects.

    Raises `zmq.ZMQError` for an address that ZMQ cannot parse.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        guard: Guard,
        kind: int,
        address: tuple[str, int],
        *,
        max_bytes: int,
        hwm: int,
        observe: Callable[[zmq.Socket[bytes]], None] | None,
    ) -> None:
        self.sock = open_socket(context, kind, max_bytes=max_bytes, hwm=hwm)
        self.outbox = Outbox()
        self._address = address
        self._renewed = time.monotonic()
        try:
            guard.protect_connecting(self.sock)
            if observe is not None:
                observe(self.sock)
            connect(self.sock, *address)
        except zmq.ZMQError:
            self.sock.close()
            raise

    def flush(self, where: str, drops: DropCounter) -> None:
        """Send what waits; connect anew, at most once a second, when that is not possible.

        libzmq connects again by itself after most failures, but never after having met a peer that speaks another
        protocol, or that has keys where we have none or the other way round: nothing can be sent then. The other
        reason is a peer that takes nothing for so long that the queue is full; what is in there is old by then.
        """
        if self.outbox.flush(self.sock, (), where, drops):
            return
        now = time.monotonic()
        if now - self._renewed >= _RENEW_SECONDS:
            self._renewed = now
            disconnect(self.sock, *self._address)
            connect(self.sock, *self._address)
