"""Handoffs between the GPUs of one host: receivers map the sender's pool in GPU memory and copy out of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from triptych.transport.data.carrier import Allocate, within_pool
from triptych.transport.data.gpu_memory import HANDLE_BYTES, GpuMemoryError
from triptych.transport.data.gpu_pool import GpuPool, adds_up
from triptych.transport.data.shm import alive
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest

PLANE: Final = "cuda-ipc"
_MAPPINGS: Final = 64

_log = logging.getLogger(__name__)


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

    def locator(self, offset: int, checksum: int) -> Locator:
        """How a peer of this host finds the copy at ``offset``."""
        return Locator(
            plane=self.plane,
            host=host_id(),
            address=self._pool.address,
            offset=offset,
            pool_bytes=self._pool.nbytes,
            checksum=checksum,
        )

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
            return out if adds_up(out, locator.checksum) else None
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
        """Let go of all mappings."""
        with self._lock:
            for address in list(self._mappings):
                self._drop(address)
