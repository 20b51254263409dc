"""What is made of a finished video on demand: a thumbnail and a sheet of its frames, remembered for a while."""

from __future__ import annotations

import asyncio
import io
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal, TypeAlias, assert_never

import av
from anyio import to_thread
from av.container import InputContainer
from av.error import FFmpegError
from av.video.frame import VideoFrame
from PIL import Image

from triptych.errors import NotFound, StorageFailed
from triptych.server.records import StoredFile

Derivation: TypeAlias = Literal["thumbnail", "spritesheet"]

MIME: Final[dict[Derivation, str]] = {"thumbnail": "image/webp", "spritesheet": "image/jpeg"}
SUFFIX: Final[dict[Derivation, str]] = {"thumbnail": ".webp", "spritesheet": ".jpg"}

THUMBNAIL_SIDE = 512
"""Longest side of a thumbnail in pixels; smaller videos keep their size."""
TILE_SIDE = 256
"""Longest side of one frame in a sheet."""
TILES = 25
"""Most frames in a sheet, spread evenly over the video."""
REMEMBERED_BYTES = 16 << 20
"""Memory for what was made; the longest unused goes first."""


def derive(path: Path, what: Derivation) -> bytes:
    """A thumbnail (the middle frame as WebP) or a sheet (frames in a near-square grid as JPEG) of a video file.

    Blocking. Raises `NotFound` when there is no such file, `StorageFailed` for one that is no video.
    """
    try:
        with av.open(str(path)) as container:
            match what:
                case "thumbnail":
                    return _encode(_scaled(_middle(container), THUMBNAIL_SIDE), "webp")
                case "spritesheet":
                    return _encode(_sheet(container), "jpeg")
                case _:
                    assert_never(what)
    except FileNotFoundError as error:
        raise NotFound(f"{path.name} is no longer in the store") from error
    except (FFmpegError, IndexError) as error:
        # Not the error's own text: it holds the path, which is the operator's business.
        reason = error.strerror if isinstance(error, FFmpegError) else "it has no pictures"
        raise StorageFailed(f"{path.name} cannot be decoded: {reason}") from error


def _middle(container: InputContainer) -> VideoFrame:
    stream = container.streams.video[0]
    target = (stream.start_time or 0) + (stream.duration or 0) // 2
    container.seek(target, stream=stream)
    found: VideoFrame | None = None
    for frame in container.decode(stream):
        found = frame
        if frame.pts is not None and frame.pts >= target:
            break
    if found is None:
        raise IndexError("it has no frames")
    return found


def _sheet(container: InputContainer) -> Image.Image:
    stream = container.streams.video[0]
    total = max(1, stream.frames)
    wanted = min(total, TILES)
    chosen = {index * total // wanted for index in range(wanted)}
    tiles = [_scaled(f, TILE_SIDE) for index, f in enumerate(container.decode(stream)) if index in chosen]
    if not tiles:
        raise IndexError("it has no frames")
    columns = math.ceil(math.sqrt(len(tiles)))
    width, height = tiles[0].size
    sheet = Image.new("RGB", (columns * width, math.ceil(len(tiles) / columns) * height))
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (index % columns * width, index // columns * height))
    return sheet


def _scaled(frame: VideoFrame, side: int) -> Image.Image:
    scale = min(1.0, side / max(frame.width, frame.height))
    return frame.to_image(width=max(1, round(frame.width * scale)), height=max(1, round(frame.height * scale)))


def _encode(picture: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=85)
    return buffer.getvalue()


class Derived:
    """Makes one thing at a time, so that a crowd of readers cannot take the machine from the router."""

    def __init__(self, fetch: Callable[[StoredFile], Awaitable[Path]]) -> None:
        self._fetch = fetch
        self._made: OrderedDict[tuple[str, Derivation], bytes] = OrderedDict()
        self._turn = asyncio.Lock()

    async def get(self, file: StoredFile, what: Derivation) -> bytes:
        """The bytes of ``what`` made of ``file``; raises as `derive` does."""
        key = (file.name, what)
        if key not in self._made:
            try:
                await self._fetch(file)  # before its turn, for which nobody waits because of a store that hangs
            except FileNotFoundError as error:
                raise NotFound(f"{file.name} is no longer in the store") from error
        async with self._turn:
            data = self._made.pop(key, None)
            if data is None:
                data = await to_thread.run_sync(derive, file.path, what)
            self._made[key] = data
            while sum(map(len, self._made.values())) > REMEMBERED_BYTES:
                self._made.popitem(last=False)
        return data
