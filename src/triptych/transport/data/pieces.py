"""Copies and checksums of large memory: in pieces that stay in the processor's cache, by a few threads at once.

Whoever copies a payload and computes its checksum after that reads it from memory twice, and one thread gets only a
part of what the memory could give. So a piece is digested as soon as it is copied, and pieces are shared out.

The checksum is one of the pieces' digests, in their order, so that it does not matter who computes which of them when.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from triptych.wire.manifest import PIECE_BYTES

Bytes: TypeAlias = npt.NDArray[np.uint8]

_MOST_THREADS = 4
_PIECES_EACH = 2
"""What is worth waking a thread for."""


class Hands:
    """Threads that help their callers with large copies: ``threads`` at most, with the caller's. Thread-safe.

    They start with the first copy that is large enough for them.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._helpers = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="triptych-copy")

    def each(self, work: Callable[[int], None], items: range) -> None:
        """Do ``work`` for every item, in any order and on several threads. Raises what ``work`` raises, when nobody is
        at work any more.

        Never waits for a helper that has not begun: the caller does what others have no time for.
        """
        todo = iter(items)

        def take() -> None:
            try:
                for item in todo:
                    work(item)
            except BaseException:
                for _ in todo:  # nobody begins another
                    pass
                raise

        helpers = self._ask(take, min(self._threads, len(items) // _PIECES_EACH) - 1)
        errors: list[BaseException | None] = []
        try:
            take()
        finally:
            errors = [helper.exception() for helper in helpers if not helper.cancel()]
        for error in errors:
            if error is not None:
                raise error

    def _ask(self, take: Callable[[], None], count: int) -> list[Future[None]]:
        asked: list[Future[None]] = []
        try:
            for _ in range(count):
                asked.append(self._helpers.submit(take))
        except RuntimeError:  # closed meanwhile, or the system has no more threads: it goes without
            pass
        return asked

    def close(self) -> None:
        """End the threads. Copies go on without them."""
        self._helpers.shutdown()


def hands_for(cores: int) -> Hands:
    """What a process that may use that many cores has: half of them, for it computes meanwhile, and four at most."""
    return Hands(max(1, min(_MOST_THREADS, cores // 2)))


class Intake:
    """New memory for a copy, uint8 [n] on the CPU, which is filled from its start and digested on the way."""

    def __init__(self, memory: torch.Tensor, hands: Hands) -> None:
        self.memory = memory
        self._bytes: Bytes = memory.numpy()
        self._hands = hands
        self._filled = 0
        self._digests = [b""] * -(-len(self._bytes) // PIECE_BYTES)

    def append(self, source: Bytes) -> None:
        """Copy the next bytes, which need not end where a piece does."""
        start, end = self._filled, self._filled + len(source)

        def take(index: int) -> None:
            piece = self._bytes[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            low, high = max(start, index * PIECE_BYTES), min(end, (index + 1) * PIECE_BYTES)
            np.copyto(self._bytes[low:high], source[low - start : high - start])
            if high == index * PIECE_BYTES + len(piece):
                self._digests[index] = xxhash.xxh3_64_digest(piece.data)

        self._hands.each(take, range(start // PIECE_BYTES, -(-end // PIECE_BYTES)))
        self._filled = end

    def checksum(self) -> int:
        """Of the memory, which must be full."""
        assert self._filled == len(self._bytes), f"{self._filled} of {len(self._bytes)} bytes are there"
        return _combined(self._digests)


def checksum(data: Bytes, hands: Hands) -> int:
    """The checksum of ``data``, as a manifest holds it."""
    digests = [b""] * -(-len(data) // PIECE_BYTES)

    def take(index: int) -> None:
        digests[index] = xxhash.xxh3_64_digest(data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES].data)

    hands.each(take, range(len(digests)))
    return _combined(digests)


def _combined(digests: list[bytes]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(digests))
