"""A client that takes its time."""

from __future__ import annotations

import contextlib
import select
import socket
import time


def dribble(wire: socket.socket, piece: bytes, seconds: float = 30.0) -> bytes:
    """Send ``piece`` again and again, with short pauses, until the other end closes; what it answered."""
    answer, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([wire], [], [], 0.02)[0]:
            try:
                part = wire.recv(65536)
            except ConnectionResetError:
                return answer
            if not part:
                return answer
            answer += part
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it answered before can still be read
            wire.sendall(piece)
    raise AssertionError(f"still connected after {seconds:g} s")
