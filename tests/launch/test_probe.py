"""What the launcher hears of a server that is not ready."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from triptych.launch.ports import free_ports
from triptych.launch.probe import UNTOLD, probe


class Guarded(BaseHTTPRequestHandler):
    """A server with keys that is asked without one."""

    def do_GET(self) -> None:
        body = b'{"ready": false, "reasons": [], "error": {"message": "not ready", "type": "x", "code": "not_ready"}}'
        self.send_response(503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def guarded() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_that_does_not_say_why_it_is_not_ready_has_answered(guarded: str) -> None:
    """Symptom: "not ready after 600 s: no answer" about a server that had answered 503 each time."""
    assert probe(guarded) == UNTOLD


def test_nobody_answers_where_nobody_listens() -> None:
    assert probe(f"http://127.0.0.1:{free_ports(1)[0]}") == ""
