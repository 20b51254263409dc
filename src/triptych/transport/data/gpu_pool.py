"""A second pool, in GPU memory, for the newest copies of a plane, out of which the GPUs of receivers take them.

What lies in it lies in the pool in host memory too, so nothing depends on it: a receiver that cannot get at it, or
finds that the copy has made room for a later one, takes the other way. It holds the newest copies that there is room
for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from triptych.errors import ConfigError, PoolFull, TooLarge
from triptych.ids import CopyId
from triptych.transport.data import layout
from triptych.transport.data.chunked import reserve_bytes
from triptych.transport.data.gpu_memory import GpuMemory, GpuMemoryError
from triptych.transport.data.pool import ALIGNMENT, Pool
from triptych.transport.data.shm import Segment
from triptych.wire.manifest import TensorEntry

_PIECE_WORDS: Final = 1 << 20
_WORD_BYTES: Final = 8


def weighted_sum(data: torch.Tensor) -> torch.Tensor:
    """A checksum that a GPU computes in passing: int64 [], of uint8 [n] with n a multiple of 8.

    Each word counts times an odd number of its own, modulo 2**64, so no change of a single word is missed. It is there
    for copies that are overwritten before or while they are read, not against an enemy.
    """
    words = data.view(torch.int64)
    weights = torch.arange(1, 2 * min(_PIECE_WORDS, words.numel()) + 1, 2, device=data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        total += (piece * weights[: piece.numel()]).sum() + piece.sum() * (2 * start)
    return total


def adds_up(data: torch.Tensor, checksum: int) -> bool:
    """Whether the bytes of a copy, uint8 [n], have this `weighted_sum`; those of no sender's copy have none."""
    return data.numel() % _WORD_BYTES == 0 and int(weighted_sum(data)) == checksum


@dataclass(frozen=True, slots=True)
class Shown:
    """A copy that is being written to the GPU pool on the current stream."""

    offset: int
    sum: torch.Tensor
    """int64 [], on the GPU."""

    def checksum(self) -> int:
        """Its `weighted_sum`; waits until the copy is written, so that whoever is told of it may read it."""
        return int(self.sum)


class GpuPool:
    """``nbytes`` of GPU memory for the newest copies of a plane. Thread-safe.

    ``register`` is given its address and bytes, and says whether a transfer engine has taken it; then a part of it is a
    receive reserve.

    Raises `ConfigError` when the GPU has not so much, or shares none.
    """

    def __init__(
        self, memory: GpuMemory, nbytes: int, segment: Segment, register: Callable[[int, int], bool] | None = None
    ) -> None:
        self.memory = memory
        self.nbytes = nbytes - nbytes % ALIGNMENT
        try:
            self.base = memory.allocate(self.nbytes)
        except GpuMemoryError as error:
            raise ConfigError(f"disagg-transfer-gpu-pool-size={nbytes}: {error}") from error
        try:
            handle = memory.export(self.base)
            self.view = memory.view(self.base, self.nbytes)
        except GpuMemoryError as error:
            memory.free(self.base)
            raise ConfigError(f"disagg-transfer-gpu-pool-size={nbytes}: {error}") from error
        self.registered = register is not None and register(self.base, self.nbytes)
        self.lock = threading.Lock()
        self.pool = Pool(self.nbytes, reserve_bytes(self.nbytes) if self.registered else 0)
        """The books, under the lock."""
        self.address = f"{segment.address}/{handle.hex()}"
        """Names the pool to peers of this host, and first the segment whose owner it lives and dies with."""

    def show(
        self, copy: CopyId, tensors: Sequence[torch.Tensor], entries: Sequence[TensorEntry], nbytes: int
    ) -> Shown | None:
        """Begin to write a copy on the current stream, if any tensor is on this GPU and there is room. The caller waits
        for the stream, and then calls `written`."""
        if not nbytes or not any(tensor.device == self.memory.device for tensor in tensors):
            return None
        try:
            with self.lock:
                block = self.pool.stage(copy, nbytes)
                self.pool.take_dropped()  # those are still in host memory
        except (PoolFull, TooLarge):
            return None
        try:
            place = self.view[block.offset : block.offset + nbytes]
            layout.write(tensors, entries, place)
            return Shown(block.offset, weighted_sum(place))
        except BaseException as error:
            self.written(copy)
            self.release([copy])
            if isinstance(error, torch.OutOfMemoryError):
                return None
            raise

    def written(self, copy: CopyId) -> None:
        """Nothing writes to the copy any more: it may make room for a later one."""
        with self.lock:
            self.pool.unpin(copy)

    def release(self, copies: Sequence[CopyId]) -> None:
        """Free copies; unknown ones are ignored."""
        with self.lock:
            for copy in copies:
                self.pool.release(copy)

    @property
    def used_bytes(self) -> int:
        """Bytes that are staged, being received, or held back for unfinished transfers."""
        with self.lock:
            return self.pool.used_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up."""
        with self.lock:
            self.pool.check_integrity()

    def close(self) -> None:
        """Give the memory back, which nothing may write to any more."""
        self.view = torch.empty(0, dtype=torch.uint8)
        self.memory.free(self.base)
