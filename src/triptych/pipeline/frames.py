"""Frames of a video that is still being decoded: one thread puts them in, another takes them out in order."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class FrameStream:
    """A video of known size whose frames come as they are done.

    ``shape`` is [frames, height, width, channels]. Iterating gives each frame once, waits for those to come, and raises
    what the decoding raised.
    """

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        self.shape = shape
        self.ndim = len(shape)
        self.size = int(np.prod(shape))
        self.seconds = 0.0
        """What decoding took; known once all frames were taken."""
        self._chunks: SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None] | Exception | None] = SimpleQueue()

    def __len__(self) -> int:
        return self.shape[0]

    def put(self, pixels: torch.Tensor) -> None:
        """Add the next frames, uint8 [frames, height, width, channels]. From a GPU they are copied beside what it does
        next, and this does not wait for it."""
        if not pixels.is_cuda:
            self._chunks.put((pixels, None))
            return
        host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
        host.copy_(pixels, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record()
        self._chunks.put((host, copied))

    def close(self, seconds: float) -> None:
        """All frames were put, after ``seconds`` of computing."""
        self.seconds = seconds
        self._chunks.put(None)

    def fail(self, error: Exception) -> None:
        """No more frames will come, because of ``error``."""
        self._chunks.put(error)

    def __iter__(self) -> Iterator[Pixels]:
        while (chunk := self._chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            pixels, copied = chunk
            if copied is not None:
                copied.synchronize()
            yield from pixels.numpy()
