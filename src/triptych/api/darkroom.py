"""Where the pictures of clients are decoded: few at a time, in threads that nothing else of the door needs, and in
memory that is taken from the room for what clients send before it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from triptych.api.clips import check_clip
from triptych.api.errors import TooBusy
from triptych.api.pictures import Size, check_picture, decoding_bytes
from triptych.api.room import share_of
from triptych.wire.clips import clip_format

Result = TypeVar("Result")

THREADS: Final = 2
WAIT_SECONDS: Final = 30.0
"""How long a picture waits for its turn."""


class Darkroom:
    """Decodes pictures in turn. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="darkroom")
        self._turns = asyncio.Semaphore(THREADS)

    async def check(
        self, request: Request, uploads: Mapping[str, Sequence[bytes]], clips: Collection[str]
    ) -> dict[str, list[Size | None]]:
        """The size of every picture, upright, by field; None for a clip, which the fields ``clips`` take too.

        Raises `BadRequest` that names the field of the first that is none, `TooBusy` when its turn does not come or
        there is no memory for it now, and `ClientDisconnect` when nobody waits for the answer any more.
        """
        return {
            field: [await self._size(request, field, data, field in clips) for data in files]
            for field, files in uploads.items()
        }

    async def run(self, work: Callable[[], Result], request: Request) -> Result:
        """What ``work`` makes of pictures, when its turn comes. Raises as `check` does."""
        async with self._turn(request):
            return await self._aside(work)

    async def _size(self, request: Request, field: str, data: bytes, may_be_clip: bool) -> Size | None:
        async with self._turn(request):
            if may_be_clip and (kind := clip_format(data)) is not None:
                await self._aside(lambda: check_clip(field, data, kind))
                return None
            needed = await self._aside(lambda: decoding_bytes(field, data))
            with share_of(request.scope).lending(field, needed):
                return await self._aside(lambda: check_picture(field, data))

    @asynccontextmanager
    async def _turn(self, request: Request) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turns.acquire()
        except TimeoutError as error:
            raise TooBusy(f"pictures of others are looked at, for {WAIT_SECONDS:g} seconds by now") from error
        try:
            if await request.is_disconnected():
                raise ClientDisconnect
            yield
        finally:
            self._turns.release()

    async def _aside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
