"""What stands between client and server fails for a while: the job goes on, and so does who waits for it."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from triptych.client import (
    AsyncClient,
    Client,
    ClientTimeout,
    RequestRefused,
    Result,
    ServerUnreachable,
    operations,
    outages,
)

CLIP = bytes(range(256)) * 40
CUT_PATIENCE = 0.5


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on, but for those that `plan` has a mishap for: a status, or ``"reset"``, ``"hang"``
    or ``"cut"``: half an answer, which takes longer than some patience."""

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = url
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.plan: Callable[[str, str, int], int | str | None] = lambda method, path, nth: None
        self.log: list[tuple[str, str]] = []
        self.released = threading.Event()

    def seen(self, method: str) -> list[str]:
        return [path for verb, path in self.log if verb == method]


class _Passing(http.server.BaseHTTPRequestHandler):
    server: Proxy  # pyright: ignore[reportIncompatibleVariableOverride]

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        self.server.log.append((self.command, path))
        mishap = self.server.plan(self.command, path, self.server.log.count((self.command, path)))
        if mishap == "hang":
            self.server.released.wait(60)
        if mishap in ("hang", "reset"):
            self.close_connection = True
            return
        if isinstance(mishap, int):
            self._answer(mishap, {"content-type": "text/html", "retry-after": "1"}, b"<html>not now</html>")
            return
        kind = {name: self.headers[name] for name in ("content-type", "idempotency-key") if name in self.headers}
        if mishap == "late":  # the server is asked, and its answer lost
            httpx.request(self.command, f"{self.server.behind}{self.path}", content=body, headers=kind)
            self.close_connection = True
            return
        there = httpx.request(self.command, f"{self.server.behind}{self.path}", content=body, headers=kind)
        kind = {"content-type": there.headers.get("content-type", "")}
        self._answer(there.status_code, kind, there.content, cut=mishap == "cut")

    do_GET = do_POST = do_DELETE = _pass

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if cut:
            self.wfile.write(body[: len(body) // 2])
            time.sleep(2 * CUT_PATIENCE)
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def proxy(house: Any) -> Iterator[Proxy]:
    with Proxy(house.url) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        yield proxy
        proxy.released.set()
        proxy.shutdown()
        thread.join()


def blocking(url: str, **said: Any) -> Result:
    with Client(url) as client:
        return client.generate("a cat", **said)


def awaited(url: str, **said: Any) -> Result:
    async def main() -> Result:
        async with AsyncClient(url) as client:
            return await client.generate("a cat", **said)

    return asyncio.run(main())


both = pytest.mark.parametrize("generate", [blocking, awaited])


@both
@pytest.mark.parametrize("mishap", [429, 502, 503, 504, "reset", "hang"])
def test_a_mishap_on_the_way_costs_a_moment_and_not_the_job(
    proxy: Proxy, generate: Callable[..., Result], mishap: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: one 502 of the proxy, or a server that stood still for half a minute, and the finished job was gone."""
    if mishap == "hang":
        monkeypatch.setattr(operations, "POLL_SECONDS", 0.5)

    def plan(method: str, path: str, nth: int) -> int | str | None:
        return mishap if method == "GET" and not path.endswith("/content") and nth <= 2 else None

    proxy.plan = plan
    assert generate(proxy.url).read() == CLIP
    assert proxy.seen("DELETE") == []


@both
@pytest.mark.parametrize("mishap", [502, 504, "reset", "late"])
def test_a_job_whose_start_was_not_confirmed_is_started_once(
    proxy: Proxy, generate: Callable[..., Result], house: Any, mishap: int | str
) -> None:
    proxy.plan = lambda method, path, nth: mishap if method == "POST" and nth == 1 else None
    seen = len(house.seen)
    assert generate(proxy.url).read() == CLIP
    assert len(proxy.seen("POST")) == 2
    assert len(house.seen) == seen + 1


@both
def test_a_refusal_is_told_at_once(proxy: Proxy, generate: Callable[..., Result]) -> None:
    proxy.plan = lambda method, path, nth: 429 if method == "POST" else None
    with pytest.raises(RequestRefused, match="429"):
        generate(proxy.url)
    assert len(proxy.seen("POST")) == 1


@both
@pytest.mark.parametrize("mishap", [502, "reset"])
def test_a_file_is_fetched_anew_when_the_way_breaks(
    proxy: Proxy, generate: Callable[..., Result], mishap: int | str, tmp_path: Path
) -> None:
    proxy.plan = lambda method, path, nth: mishap if path.endswith("/content") and nth <= 2 else None
    assert generate(proxy.url, path=tmp_path / "a.mp4").read() == CLIP
    assert proxy.seen("DELETE") == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


@both
@pytest.mark.parametrize("to_file", [False, True])
def test_a_long_download_that_breaks_is_begun_anew_however_long_it_took(
    proxy: Proxy, generate: Callable[..., Result], to_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: one that broke after two minutes was given up as if the server had been silent for so long."""
    monkeypatch.setattr(outages, "PATIENCE_SECONDS", CUT_PATIENCE)
    proxy.plan = lambda method, path, nth: "cut" if path.endswith("/content") and nth <= 2 else None
    assert generate(proxy.url, path=tmp_path / "a.mp4" if to_file else None).read() == CLIP
    assert len([path for path in proxy.seen("GET") if path.endswith("/content")]) == 3


@both
def test_an_outage_without_end_is_told_and_leaves_the_job(
    proxy: Proxy, generate: Callable[..., Result], house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "PATIENCE_SECONDS", 0.0)
    proxy.plan = lambda method, path, nth: 502 if method == "GET" else None
    with pytest.raises(ServerUnreachable, match=r"no answer about job video_\w+ .*it may go on: .*502") as caught:
        generate(proxy.url)
    assert proxy.seen("DELETE") == []
    job = next(word for word in caught.value.message.split() if word.startswith("video_"))
    with Client(house.url) as client:
        assert client.wait(job).status == "completed"


@both
def test_the_callers_own_timeout_stops_the_job_also_during_an_outage(
    proxy: Proxy, generate: Callable[..., Result]
) -> None:
    proxy.plan = lambda method, path, nth: "hang" if method == "GET" else None
    with pytest.raises(ClientTimeout, match=r"did not end within 1\.5 seconds"):
        generate(proxy.url, timeout=1.5)
    assert len(proxy.seen("DELETE")) == 1


def test_a_file_that_cannot_be_written_leaves_the_finished_job(house: Any, tmp_path: Path) -> None:
    with Client(house.url) as client:
        before = {job.id for job in client.list(limit=100)}
        with pytest.raises(OSError, match="no such folder"):
            client.generate("a cat", path=tmp_path / "no such folder" / "a.mp4")
        (job,) = {job.id for job in client.list(limit=100)} - before
        assert client.download(job) == CLIP
        client.delete(job)


def test_readiness_is_waited_for_behind_a_proxy_that_finds_no_server(proxy: Proxy) -> None:
    proxy.plan = lambda method, path, nth: (502, 503, "reset")[nth - 1] if nth <= 3 else None
    with Client(proxy.url) as client:
        client.wait_ready(60)
    assert len(proxy.seen("GET")) == 4
