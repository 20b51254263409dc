"""One HTTP connection, with an end to everything that a client could drag out: its request's head, and our answer.

uvicorn bounds neither: a head that comes byte by byte, or an answer that is never read, would hold a connection for
ever. (`Gate` bounds what comes between, the body.)
"""

from __future__ import annotations

import asyncio
import fcntl
import termios
from array import array
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 15.0
"""From the connection, or the end of the last answer, to the last byte of a request's head."""
HEAD_BYTES = 64 << 10
"""Longest head, give or take what one read from the socket brings."""
READ_SECONDS = 60.0
READ_BYTES = 64 << 10
"""What a client has to read of an answer within that time, or all of it. A file waits in pieces of that size; other
answers, pictures in JSON among them, wait as a whole."""
SHUTDOWN_SECONDS = 5
"""How long open connections may take to end once the server was asked to stop."""


def http_settings(app: ASGIApp, proxies: str | None = None) -> uvicorn.Config:
    """How uvicorn serves ``app``. ``proxies``: addresses and networks whose X-Forwarded headers are believed, with
    commas between, ``*`` for all; None: those of the variable FORWARDED_ALLOW_IPS, or loopback."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        forwarded_allow_ips=proxies,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        lifespan="on",
    )


class Connection(HttpToolsProtocol):
    """uvicorn's connection with deadlines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        """Whether the next byte belongs to a head."""
        self._heads = 0
        """Heads that were whole."""
        self._head_bytes = 0
        """What earlier reads brought of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._head_timer = _cancelled(self._head_timer)
        self._read_timer = _cancelled(self._read_timer)
        super().connection_lost(exc)

    # -- from the client ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what came, and refuse a head without end."""
        in_head, heads = self._in_head, self._heads
        super().data_received(data)
        if in_head and self._in_head and self._heads == heads:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._in_head = False
        self._heads += 1
        self._head_bytes = 0
        self._head_timer = _cancelled(self._head_timer)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A body is whole, so what follows is the next head."""
        self._in_head = True
        super().on_message_complete()

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(b"408 Request Timeout")
        else:  # nothing came, or what still comes is a body that was answered long ago
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    # -- to the client -----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client does not read as fast as we answer."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._read_timer = _cancelled(self._read_timer)

    def on_response_complete(self) -> None:
        """An answer is out, or waits to be read by a client whose connection is to be closed."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reading()
        elif self.cycle.response_complete and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_overdue)

    def timeout_keep_alive_handler(self) -> None:
        """The client asks for nothing more."""
        super().timeout_keep_alive_handler()
        self._await_reading()

    def _await_reading(self) -> None:
        if self._read_timer is None and self.transport.get_write_buffer_size():
            self._read_timer = self.loop.call_later(READ_SECONDS, self._judge_reading, self._unread())

    def _judge_reading(self, before: int) -> None:
        self._read_timer = None
        if before - self._unread() < READ_BYTES:
            self.transport.abort()
        else:
            self._await_reading()

    def _unread(self) -> int:
        """Bytes that the client's machine has not taken: those here, and those in the kernel, which takes megabytes."""
        waiting = self.transport.get_write_buffer_size()
        wire = self.transport.get_extra_info("socket")
        if wire is None or wire.fileno() < 0:
            return waiting
        queued = array("i", [0])
        fcntl.ioctl(wire.fileno(), termios.TIOCOUTQ, queued)
        return waiting + queued[0]


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
