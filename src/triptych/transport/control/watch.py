"""Notices that nobody listens at a work port any more: the process that did has ended.

Theory of operation. The kernel closes the connections of a process at the moment of its death, however it dies, and
refuses new ones to its port. libzmq sees the first and tries to connect again; when that fails, one connection of our
own asks why. Only a refusal is taken for an end: a frozen process, a full queue and a network that is cut refuse
nothing, and are left to the missing heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_PATIENCE = 1.0
"""Seconds that the question may take; a host that does not answer has not refused."""


class Watch:
    """Asks at work ports that could not be connected to, one question a port at a time.

    Belongs to the thread of ``loop``, except `failed`. ``gone`` is called there with the work port that refused.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, gone: Callable[[str], None]) -> None:
        self._loop = loop
        self._gone = gone
        self._asking: dict[str, asyncio.Task[None]] = {}

    def failed(self, work_url: str, address: tuple[str, int], *, wanted: Callable[[], bool]) -> None:
        """A connection to ``work_url`` could not be made. From any thread; nothing happens unless still ``wanted``."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ask, work_url, address, wanted)

    def _ask(self, work_url: str, address: tuple[str, int], wanted: Callable[[], bool]) -> None:
        if work_url not in self._asking and wanted():
            self._asking[work_url] = self._loop.create_task(self._find_out(work_url, address))

    async def _find_out(self, work_url: str, address: tuple[str, int]) -> None:
        refused = await _refuses(*address)
        del self._asking[work_url]
        if refused:
            self._gone(work_url)

    def forget(self, work_url: str) -> None:
        """Whoever listened there is of no interest any more; an answer that is under way is not told."""
        if (task := self._asking.pop(work_url, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Ask no more."""
        for work_url in tuple(self._asking):
            self.forget(work_url)


async def _refuses(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_PATIENCE):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    return False
