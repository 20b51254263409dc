"""Handoffs between the GPUs of one host: a second pool, in GPU memory, that receivers map and copy out of.

What lies in it lies in the pool in host memory too, so nothing depends on it: a receiver that cannot map it, or finds
that the copy has made room for a later one, takes the other way. It holds the newest copies that it has room for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from triptych.errors import ConfigError, PoolFull, TooLarge
from triptych.ids import CopyId
from triptych.transport.data import layout
from triptych.transport.data.carrier import Allocate, within_pool
from triptych.transport.data.gpu_memory import HANDLE_BYTES, GpuMemory, GpuMemoryError
from triptych.transport.data.pool import Pool
from triptych.transport.data.shm import Segment, alive
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest, TensorEntry

PLANE: Final = "cuda-ipc"
_MAPPINGS: Final = 64
_PIECE_WORDS: Final = 1 << 20

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Shown:
    """A copy that is being written to the GPU pool on the current stream."""

    pool: GpuPool
    offset: int
    checksum: torch.Tensor
    """int64 [], on the GPU."""

    def locator(self) -> Locator:
        """How a peer finds the copy; waits until it is written."""
        pool = self.pool
        return Locator(
            plane=PLANE,
            host=host_id(),
            address=pool.address,
            offset=self.offset,
            pool_bytes=pool.nbytes,
            checksum=int(self.checksum),
        )


class GpuPool:
    """``nbytes`` of GPU memory for the newest copies of a plane. Thread-safe.

    Raises `ConfigError` when the GPU has not so much, or shares none.
    """

    def __init__(self, memory: GpuMemory, nbytes: int, segment: Segment) -> None:
        self.memory = memory
        self._lock = threading.Lock()
        self._pool = Pool(nbytes)
        self.nbytes = self._pool.capacity
        try:
            self.base = memory.allocate(self.nbytes)
        except GpuMemoryError as error:
            raise ConfigError(f"disagg-transfer-gpu-pool-size={nbytes}: {error}") from error
        try:
            handle = memory.export(self.base)
            self._view = memory.view(self.base, self.nbytes)
        except GpuMemoryError as error:
            memory.free(self.base)
            raise ConfigError(f"disagg-transfer-gpu-pool-size={nbytes}: {error}") from error
        self.address = f"{segment.address}/{handle.hex()}"
        """Names the pool to peers, and first the segment whose owner it lives and dies with."""

    def show(
        self, copy: CopyId, tensors: Sequence[torch.Tensor], entries: Sequence[TensorEntry], nbytes: int
    ) -> Shown | None:
        """Begin to write a copy on the current stream, if any tensor is on this GPU and there is room. The caller waits
        for the stream, and then calls `written`."""
        if not nbytes or not any(tensor.device == self.memory.device for tensor in tensors):
            return None
        try:
            with self._lock:
                block = self._pool.stage(copy, nbytes)
                self._pool.take_dropped()  # those are still in host memory
        except (PoolFull, TooLarge):
            return None
        try:
            place = self._view[block.offset : block.offset + nbytes]
            layout.write(tensors, entries, place)
            return Shown(self, block.offset, weighted_sum(place))
        except BaseException as error:
            self.written(copy)
            self.release([copy])
            if isinstance(error, torch.OutOfMemoryError):
                return None
            raise

    def written(self, copy: CopyId) -> None:
        """Nothing writes to the copy any more: it may make room for a later one."""
        with self._lock:
            self._pool.unpin(copy)

    def release(self, copies: Sequence[CopyId]) -> None:
        """Free copies; unknown ones are ignored."""
        with self._lock:
            for copy in copies:
                self._pool.release(copy)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up."""
        with self._lock:
            self._pool.check_integrity()

    def close(self) -> None:
        """Give the memory back."""
        self._view = torch.empty(0, dtype=torch.uint8)
        self.memory.free(self.base)


@dataclass(eq=False, slots=True)
class _Mapping:
    """The GPU pool of a peer."""

    base: int = 0
    nbytes: int = 0
    """0: it cannot be had."""
    readers: int = 0


class CudaIpcCarrier:
    """Copies out of the GPU pools of this host, into new memory of our GPU. Thread-safe."""

    plane = PLANE

    def __init__(self, pool: GpuPool) -> None:
        self._pool = pool
        self._memory = pool.memory
        self._lock = threading.Lock()
        self._mappings: dict[str, _Mapping] = {}

    def reaches(self, locator: Locator) -> bool:
        """Whether the copy is on this host."""
        return locator.plane == self.plane and locator.host == host_id()

    def fetch(
        self,
        manifest: Manifest,
        locator: Locator,
        allocate: Allocate,
        *,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> torch.Tensor | None:
        """The verified bytes of a copy, uint8 [nbytes] on our GPU; None when they cannot be had in this way."""
        with self._lock:
            mapping = self._enter(locator.address, manifest)
        if mapping is None:
            return None
        try:
            within_pool(manifest, locator, mapping.nbytes)
            out = torch.empty(manifest.nbytes, dtype=torch.uint8, device=self._memory.device)
            self._memory.copy(out.data_ptr(), mapping.base + locator.offset, manifest.nbytes)
            return out if int(weighted_sum(out)) == locator.checksum else None
        except torch.OutOfMemoryError:
            return None
        except GpuMemoryError as error:
            _log.warning("%s: copy %s of %s: %s", PLANE, manifest.copy, manifest.producer, error)
            return None
        finally:
            with self._lock:
                mapping.readers -= 1

    def _enter(self, address: str, manifest: Manifest) -> _Mapping | None:
        """The mapping of a pool with one reader more; None when it cannot be mapped."""
        self._let_go_of_the_dead()
        mapping = self._mappings.pop(address, None)
        if mapping is None:
            mapping = self._map(address, manifest)
        self._mappings[address] = mapping
        if not mapping.nbytes:
            return None
        mapping.readers += 1
        return mapping

    def _map(self, address: str, manifest: Manifest) -> _Mapping:
        if address == self._pool.address:  # CUDA does not map a process's own memory
            return _Mapping(self._pool.base, self._pool.nbytes)
        owner, _, handle = address.rpartition("/")
        try:
            named = bytes.fromhex(handle)
        except ValueError:
            named = b""
        if len(named) != HANDLE_BYTES or not alive(owner):
            return _Mapping()
        try:
            return _Mapping(*self._memory.map(named))
        except GpuMemoryError as error:
            _log.warning(
                "the GPU memory of %s cannot be mapped, so its handoffs go through host memory: %s",
                manifest.producer,
                error,
            )
            return _Mapping()

    def _let_go_of_the_dead(self) -> None:
        """A mapping keeps the memory of a dead owner taken."""
        excess = len(self._mappings) - _MAPPINGS
        for number, (address, mapping) in enumerate(list(self._mappings.items())):
            if not mapping.readers and (number < excess or not alive(address.rpartition("/")[0])):
                self._drop(address)

    def _drop(self, address: str) -> None:
        mapping = self._mappings.pop(address)
        if mapping.nbytes and address != self._pool.address:
            try:
                self._memory.unmap(mapping.base)
            except GpuMemoryError as error:
                _log.warning("the GPU memory of a peer cannot be unmapped: %s", error)

    def close(self) -> None:
        """Let go of all mappings and of the pool."""
        with self._lock:
            for address in list(self._mappings):
                self._drop(address)
        self._pool.close()
