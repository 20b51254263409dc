"""Pictures from the web: only the public internet is reached, whatever names, redirects and servers say."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from triptych.api import fetch
from triptych.api.fetch import Fetcher, is_public
from triptych.errors import BadRequest

DATA = b"\x89PNG" * 100


class Handler(BaseHTTPRequestHandler):
    """A web server with the habits that matter; every path is one."""

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        self.server.seen.append((self.path, self.headers["host"]))  # type: ignore[attr-defined]
        match self.path:
            case "/picture":
                self.answer(200, DATA)
            case "/inside":
                self.answer(302, b"", location=f"http://127.0.0.2:{port}/picture")
            case "/around":
                self.answer(302, b"", location="/picture")
            case "/for-ever":
                self.answer(302, b"", location="/for-ever")
            case "/file":
                self.answer(302, b"", location="file:///etc/passwd")
            case "/unchanged":
                self.answer(304, b"")
            case "/nowhere":
                self.answer(302, b"")
            case "/broken":
                self.answer(302, b"", location="http://[bad/")
            case "/packed":
                self.answer(200, DATA, content_encoding="gzip")
            case "/endless":
                self.send_response(200)
                self.end_headers()
                try:
                    while True:
                        self.wfile.write(b"x" * 65536)
                except OSError:
                    return
            case "/slow":
                time.sleep(1)
            case _:
                self.answer(404, b"")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[Any]:
    """A web server on every loopback address."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetched(web: Any, path: str, host: str = "127.0.0.1", limit: int = 10_000) -> bytes:
    """What the fetcher brings when 127.0.0.1 alone counts as the public internet."""
    fetcher = Fetcher(limit, permits=lambda address: str(address) == "127.0.0.1")
    return asyncio.run(fetcher.fetch("image", f"http://{host}:{web.server_address[1]}{path}"))


def test_a_picture_is_fetched_by_its_name(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(web, "/picture") == DATA
    assert fetched(web, "/around") == DATA
    pointed(monkeypatch, {"pictures.example": ["127.0.0.1"]})
    assert fetched(web, "/picture", "pictures.example") == DATA
    assert web.seen[-1] == ("/picture", f"pictures.example:{web.server_address[1]}")


def pointed(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> list[str]:
    """Have names point at addresses; returns what is asked for."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", (address, port)) for address in names.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_a_name_is_looked_up_once_and_the_checked_address_is_used(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pointed(monkeypatch, {"rebind.example": ["127.0.0.1"]})
    assert fetched(web, "/picture", "rebind.example") == DATA
    assert asked.count("rebind.example") == 1


def test_a_name_with_one_address_inside_is_a_trap(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pointed(monkeypatch, {"trap.example": ["127.0.0.1", "10.0.0.1"]})
    with pytest.raises(BadRequest, match="not on the public internet"):
        fetched(web, "/picture", "trap.example")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/inside", "not on the public internet"),
        ("/for-ever", "redirects more than 3 times"),
        ("/file", "must be an http or https URL"),
        ("/unchanged", "answered 304"),
        ("/nowhere", "answered 302"),
        ("/broken", "not a URL"),
        ("/packed", "compressed"),
        ("/endless", "more than 10000 bytes"),
        ("/nothing", "answered 404"),
    ],
)
def test_what_a_server_may_not_do(web: Any, path: str, reason: str) -> None:
    before = len(web.seen)
    with pytest.raises(BadRequest, match=reason) as caught:
        fetched(web, path)
    assert caught.value.field == "image"
    assert all(host != "127.0.0.2" for _, host in web.seen[before:])


def test_a_server_that_does_not_answer_is_given_up(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.2)
    with pytest.raises(BadRequest, match=r"within 0\.2 seconds"):
        fetched(web, "/slow")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "http://127.1/a.png",
        "http://2130706433/a.png",
        "http://0x7f000001/a.png",
        "http://localhost/a.png",
        "http://[::1]/a.png",
        "http://[::ffff:127.0.0.1]/a.png",
        "http://10.1.2.3/a.png",
        "http://172.16.0.1/a.png",
        "http://192.168.0.1/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://100.64.0.1/a.png",
        "http://0.0.0.0/a.png",
        "http://224.0.0.1/a.png",
        "http://[fe80::1]/a.png",
        "http://[fd00::1]/a.png",
    ],
)
def test_nothing_inside_is_reached(url: str) -> None:
    with pytest.raises(BadRequest, match=r"not on the public internet|not known"):
        asyncio.run(Fetcher(1000).fetch("image", url))


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@example.com/a",
        "http:///a",
        "ftp://example.com/a",
        "http://[::1",
        "http://a:x/",
        "http://example.com/\ud800",
        "http://\ud800/",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="URL"):
        asyncio.run(Fetcher(1000).fetch("image", url))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", False),  # never as good as the plain address
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:1::1", False),
        ("255.255.255.255", False),
        ("fec0::1", False),
        ("3fff::1", False),
        ("168.63.129.16", False),
        ("64:ff9b::a83f:8110", False),  # the same behind NAT64
        ("192.0.0.192", False),
        ("::", False),
        ("ff02::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public
