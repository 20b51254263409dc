"""Clients that take their time, or hang up."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any


def dial(port: int, path: str, body: dict[str, Any], *, key: str | None = None) -> socket.socket:
    """A client that has sent its request, and hangs up when it is closed. ``key``: its Idempotency-Key."""
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: [::]\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    wire = socket.create_connection(("127.0.0.1", port))
    if key is not None:
        head += f"idempotency-key: {key}\r\n"
    wire.sendall(f"{head}\r\n{content}".encode())
    return wire


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
