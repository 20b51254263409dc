"""Host names of clients: slow ones keep no others waiting, and nothing of them outlives its look-up."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from triptych.api import lookups
from triptych.api.errors import TooBusy
from triptych.api.lookups import MOST, MOST_OF_SITE, Lookups


class Resolver:
    """Answers names under ``slow`` domains when it is told to."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.go = threading.Event()

    def getaddrinfo(self, host: str, port: int | None, **_: Any) -> list[Any]:
        self.asked[host] += 1
        if host.startswith("slow"):
            assert self.go.wait(60)
        if host.startswith("unknown"):
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", ("192.0.2.1", 0))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    stub = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", stub.getaddrinfo)
    yield stub
    stub.go.set()


def with_slow(
    resolver: Resolver, hosts: list[str], then: Callable[[Lookups], Coroutine[Any, Any, None]], under_way: int
) -> None:
    """Do something while ``hosts`` are looked up, so many of them at once."""

    async def main() -> None:
        finder = Lookups()
        slow = [asyncio.ensure_future(finder.addresses(host)) for host in hosts]
        async with asyncio.timeout(60):
            while sum(resolver.asked.values()) < under_way:
                await asyncio.sleep(0.01)
        await then(finder)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        resolver.go.set()
        async with asyncio.timeout(60):
            assert await finder.addresses("later.example") == ["192.0.2.1"]

    asyncio.run(main())


def test_slow_names_of_one_site_keep_no_other_waiting(resolver: Resolver) -> None:
    """Symptom: a hundred names whose server never answered stopped all fetching for minutes."""

    async def other(finder: Lookups) -> None:
        async with asyncio.timeout(30):
            assert await finder.addresses("pictures.example") == ["192.0.2.1"]

    with_slow(resolver, [f"slow{i}.evil.example" for i in range(100)], other, MOST_OF_SITE)
    assert sum(count for host, count in resolver.asked.items() if host.startswith("slow")) == MOST_OF_SITE


def test_a_turn_that_does_not_come_is_put_off(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    async def other(finder: Lookups) -> None:
        monkeypatch.setattr(lookups, "WAIT_SECONDS", 0.05)
        for host in ("a.pictures.example", "slow.site0.example"):
            with pytest.raises(TooBusy):
                await finder.addresses(host)

    hosts = [f"slow{i}.site{i % (MOST // MOST_OF_SITE)}.example" for i in range(MOST)]
    with_slow(resolver, hosts, other, MOST)


def test_those_who_ask_for_one_name_wait_together(resolver: Resolver) -> None:
    async def others(finder: Lookups) -> None:
        same = [asyncio.ensure_future(finder.addresses("slow.bucket.example")) for _ in range(50)]
        await asyncio.sleep(0)
        resolver.go.set()
        async with asyncio.timeout(60):
            assert await asyncio.gather(*same) == [["192.0.2.1"]] * 50

    with_slow(resolver, ["slow.bucket.example"], others, 1)
    assert resolver.asked["slow.bucket.example"] == 1


def test_a_name_that_is_not_known_is_looked_up_again(resolver: Resolver) -> None:
    async def twice() -> None:
        finder = Lookups()
        for _ in range(2):
            with pytest.raises(OSError, match="not known"):
                await finder.addresses("unknown.example")

    asyncio.run(twice())
    assert resolver.asked["unknown.example"] == 2


def test_a_look_up_that_finds_no_thread_is_put_off_and_keeps_no_turn(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: each one lost its turn, and its name was never answered again, until the server was started anew."""

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        finder = Lookups()
        hosts = [f"h{i}.pictures.example" for i in range(MOST_OF_SITE + 1)]
        with monkeypatch.context() as machine:
            machine.setattr(threading.Thread, "start", full)
            for host in hosts:
                with pytest.raises(TooBusy, match="thread"):
                    await finder.addresses(host)
        async with asyncio.timeout(60):
            for host in hosts:
                assert await finder.addresses(host) == ["192.0.2.1"]

    monkeypatch.setattr(lookups, "WAIT_SECONDS", 1.0)
    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "site"),
    [("a.b.Example.com.", "example.com"), ("example.com", "example.com"), ("localhost", "localhost"), ("", "")],
)
def test_names_of_one_site_end_alike(host: str, site: str) -> None:
    assert lookups.site_of(host) == site
