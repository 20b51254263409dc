"""Look-ups of host names that clients chose, whose owners may have them answered slowly or never.

The system's resolver cannot be told to give up, so each look-up has a thread of its own, which ends when the resolver
does and keeps no process alive. There are few of them at once, and fewer for the names of one site, since whoever owns
one site has as many names there as he likes.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import defaultdict
from contextlib import suppress
from typing import Final

from triptych.api.errors import TooBusy

MOST: Final = 32
"""Look-ups at once."""
MOST_OF_SITE: Final = 4
"""Of them, of names that end alike."""
WAIT_SECONDS: Final = 10.0
"""How long a look-up waits for its turn."""


class Lookups:
    """Finds the addresses of hosts. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MOST)
        self._sites: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOST_OF_SITE))
        self._asking: defaultdict[str, int] = defaultdict(int)
        """Callers that hold a turn of a site, or wait for one."""
        self._under_way: dict[str, asyncio.Future[list[str]]] = {}

    async def addresses(self, host: str) -> list[str]:
        """Every address of a host as text. Raises `OSError` or `UnicodeError` for one that is not known, and `TooBusy`
        when its turn does not come or the machine has no thread for it. Who is cancelled meanwhile waits no longer, and
        those of one name wait together.
        """
        if (found := self._under_way.get(host)) is None:
            site = site_of(host)
            await self._take_turn(site)
            found = self._under_way.get(host)
            if found is None:
                found = self._begin(host, site)
            else:  # somebody else began meanwhile
                self._end_turn(site)
        return await asyncio.shield(found)

    async def _take_turn(self, site: str) -> None:
        self._asking[site] += 1
        held: list[asyncio.Semaphore] = []
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                for turns in (self._sites[site], self._turns):
                    await turns.acquire()
                    held.append(turns)
        except BaseException as error:
            for turns in held:
                turns.release()
            self._forget(site)
            if isinstance(error, TimeoutError):
                raise TooBusy(f"hosts of others are looked up, for {WAIT_SECONDS:g} seconds by now") from error
            raise

    def _end_turn(self, site: str) -> None:
        self._turns.release()
        self._sites[site].release()
        self._forget(site)

    def _forget(self, site: str) -> None:
        self._asking[site] -= 1
        if not self._asking[site]:
            del self._asking[site], self._sites[site]

    def _begin(self, host: str, site: str) -> asyncio.Future[list[str]]:
        loop = asyncio.get_running_loop()
        future = self._under_way[host] = loop.create_future()

        def ended(outcome: list[str] | Exception) -> None:
            del self._under_way[host]
            self._end_turn(site)
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
                future.exception()  # nobody may be waiting any more
            else:
                future.set_result(outcome)

        def look() -> None:
            outcome = _addresses(host)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended, outcome)

        try:
            threading.Thread(target=look, name="lookup", daemon=True).start()
        except RuntimeError as error:
            ended(TooBusy(f"there is no thread for another look-up now: {error}"))
        return future


def site_of(host: str) -> str:
    """What the names of one owner have in common, as far as a name tells: its last two labels."""
    return ".".join(host.lower().rstrip(".").split(".")[-2:])


def _addresses(host: str) -> list[str] | Exception:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except Exception as error:  # raised where it is waited for
        return error
