"""Weights from files to a device, through a small ring of host memory that the device reads by itself.

A copy from ordinary memory, a mapped file's included, goes through the driver's own small buffer on one thread, which
is several times slower than the bus. Here several threads read pieces of a file into page-locked buffers, and each
piece is on its way to the device while the next ones are read. The ring is all of the host's memory that this takes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from triptych.page_lock import page_lock, page_unlock
from triptych.pipeline.stored import Stored

log = logging.getLogger(__name__)

PIECE: Final = 8 << 20
"""Bytes of a buffer: long enough for its copy to hide what starting one costs, short enough for several to share a
tensor."""
PIECES: Final = 12
"""One for each reader, and some on their way meanwhile."""
READERS: Final = min(8, os.cpu_count() or 1)
"""A thread copies 6 to 7 GB/s out of the system's cache, which is an eighth of what PCIe 5 takes."""

Arrival: TypeAlias = Callable[[], None]
"""Returns once a copy is done, so that its source may be overwritten."""


class Lane(Protocol):
    """How weights come to one device."""

    @property
    def device(self) -> torch.device:
        """Where they come to."""
        ...

    def lock(self, memory: Tensor) -> None:
        """Prepare host memory to be sent from."""
        ...

    def unlock(self, memory: Tensor) -> None:
        """The end of that; nothing is on its way from there any more."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the device, whose contents do not matter."""
        ...

    def send(self, source: Tensor, target: Tensor) -> Arrival:
        """Begin to copy locked memory to a tensor on the device, to which it is cast there if the dtypes differ."""
        ...


class CudaLane:
    """To a GPU, by copies on the stream that is current where this is made.

    Whatever thread calls is at our GPU while it does: one that is at another would open that one too, if only by going
    back to it, which takes memory there for as long as the process lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._locked = False

    @property
    def device(self) -> torch.device:
        """The GPU, with its index."""
        return self._stream.device

    def lock(self, memory: Tensor) -> None:
        """Page-lock it; memory that cannot be is used as it is, which is right and slower."""
        status = page_lock(memory, self.device)
        self._locked = status == 0
        if not self._locked:
            log.warning("CUDA cannot page-lock memory to load weights (error %d): it will be slower", status)

    def unlock(self, memory: Tensor) -> None:
        """Give it back to the system's paging."""
        if self._locked:
            page_unlock(memory, self.device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the stream, so that what was there before is done with it."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def send(self, source: Tensor, target: Tensor) -> Arrival:
        """Returns at once; a cast takes as much memory of the GPU for the moment as the source has."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
            else:
                target.copy_(source.to(self.device, non_blocking=True))
            # Whoever waits sleeps: a thread that spins would take the core of one that reads.
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        return partial(self._wait, arrived)

    def _wait(self, arrived: torch.cuda.Event) -> None:
        with torch.cuda.device(self.device):
            arrived.synchronize()


def lane_to(device: torch.device) -> Lane | None:
    """The lane to a device; None where weights may stay in the file's own mapping, or are best copied out of it."""
    return CudaLane(device) if device.type == "cuda" else None


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    arrived: Arrival
    """Of what was last sent from it."""


class OnTheWay:
    """A tensor that comes to the device in pieces."""

    def __init__(self, target: Tensor, pieces: list[Future[Arrival]]) -> None:
        self._target = target
        self._pieces = pieces

    def arrived(self) -> Tensor:
        """The tensor, once all of it is there. Raises `OSError` when the file could not be read to its end."""
        for piece in self._pieces:
            piece.result()()
        return self._target


class Staging:
    """A ring of buffers, and the threads that fill it. Any thread may `begin` a tensor."""

    def __init__(self, lane: Lane, *, piece: int = PIECE, pieces: int = PIECES, readers: int = READERS) -> None:
        """``piece`` is in bytes, a multiple of 8; at most one reader for each of the ``pieces`` has work."""
        self._lane = lane
        self._piece = piece
        self._ring = torch.empty(piece * pieces, dtype=torch.uint8)
        lane.lock(self._ring)
        self._buffers = [_Buffer(memory, _nothing_sent) for memory in self._ring.split(piece)]
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for buffer in self._buffers:
            self._free.put(buffer)
        self._readers = ThreadPoolExecutor(readers, "weights")
        self._opening = threading.Lock()
        self._files: dict[Path, int] = {}
        self._nbytes = 0

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reaches(self, device: torch.device) -> bool:
        """Whether the tensors come to that device; one without an index is the current one."""
        own = self._lane.device
        return device.type == own.type and device.index in (None, own.index)

    @property
    def nbytes(self) -> int:
        """Bytes of files that were asked for so far."""
        return self._nbytes

    def begin(self, stored: Stored, dtype: torch.dtype | None = None) -> OnTheWay:
        """Have a tensor read and sent to the device, as ``dtype`` (None: the file's). Returns at once.

        Raises `OSError` for a file that cannot be opened, `RuntimeError` after `close`.
        """
        width = stored.dtype.itemsize
        with self._opening:
            if stored.file not in self._files:
                self._files[stored.file] = os.open(stored.file, os.O_RDONLY | os.O_CLOEXEC)
            self._nbytes += stored.elements * width
        target = self._lane.empty(stored.shape, dtype or stored.dtype)
        parts = target.view(-1).split(self._piece // width) if stored.elements else ()
        pieces: list[Future[Arrival]] = []
        offset = stored.offset
        for part in parts:
            pieces.append(self._readers.submit(self._carry, stored, offset, part))
            offset += part.numel() * width
        return OnTheWay(target, pieces)

    def close(self) -> None:
        """Forget what was not begun, wait for what was, and give memory and files back."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        try:
            for buffer in self._buffers:
                buffer.arrived()
        finally:
            self._lane.unlock(self._ring)
            for opened in self._files.values():
                os.close(opened)
            self._files.clear()
            # Here and now, whoever still knows this object.
            self._buffers.clear()
            self._free = SimpleQueue()
            del self._ring

    def _carry(self, stored: Stored, offset: int, part: Tensor) -> Arrival:
        buffer = self._free.get()  # whoever has one gives it back, also after an error
        try:
            buffer.arrived()
            memory = buffer.memory[: part.numel() * stored.dtype.itemsize]
            _read(self._files[stored.file], memory, offset, stored)
            buffer.arrived = self._lane.send(memory.view(stored.dtype), part)
            return buffer.arrived
        finally:
            self._free.put(buffer)


def _nothing_sent() -> None:
    pass


def _read(opened: int, memory: Tensor, offset: int, stored: Stored) -> None:
    """Fill ``memory`` from the file's byte ``offset`` on; the thread holds no lock of Python's while it does."""
    left = memory.numpy().data
    while left:
        count = os.preadv(opened, [left], offset)
        if count == 0:
            raise OSError(f"{stored.file} ends at byte {offset}, in the middle of {stored.name!r}")
        left, offset = left[count:], offset + count
