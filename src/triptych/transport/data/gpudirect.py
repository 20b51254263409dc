"""Handoffs between GPUs of different hosts: the receiver reads out of the sender's GPU memory into its own, through the
Mooncake engine, with which both have registered their pools there.

With RDMA the adapters do that by themselves (GPUDirect RDMA). Over TCP the engine copies through host memory in a
slower way than ours is, so nothing takes that unless it is forced. What cannot be had so comes through host memory; a
pool that fails is left alone for a while, since each attempt costs time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from triptych.errors import TransferError
from triptych.transport.data import layout
from triptych.transport.data.carrier import Allocate
from triptych.transport.data.chunked import ChunkReader, Landing, address_of, source
from triptych.transport.data.engine import Engine
from triptych.transport.data.gpu_memory import GpuMemoryError
from triptych.transport.data.gpu_pool import GpuPool, adds_up
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest

PLANE: Final = "gpudirect"
_LEFT_ALONE_SECONDS: Final = 60.0
_MOST_LEFT_ALONE: Final = 64

_log = logging.getLogger(__name__)


class GpuDirectCarrier:
    """Reads copies of other processes, from GPU memory to new memory of our GPU. Thread-safe."""

    plane = PLANE

    def __init__(self, engine: Engine, pool: GpuPool) -> None:
        self._address = address_of(engine.session, pool.base)
        self._pool = pool
        self._reader = ChunkReader(engine, Landing(pool.pool, pool.lock, pool.base))
        self._lock = threading.Lock()
        self._left_alone: dict[str, float] = {}
        """Addresses of pools that failed, and until when they are left alone."""

    def locator(self, offset: int, checksum: int) -> Locator:
        """How a peer finds the copy at ``offset``: the engine's session, and where the pool starts in GPU memory."""
        return Locator(
            plane=self.plane,
            host=host_id(),
            address=self._address,
            offset=offset,
            pool_bytes=self._pool.nbytes,
            checksum=checksum,
        )

    def reaches(self, locator: Locator) -> bool:
        """Any host is within reach; a pool that failed a moment ago is not."""
        if locator.plane != self.plane:
            return False
        with self._lock:
            return self._left_alone.get(locator.address, 0.0) <= time.monotonic()

    def fetch(
        self,
        manifest: Manifest,
        locator: Locator,
        allocate: Allocate,
        *,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> torch.Tensor | None:
        """The verified bytes of a copy, uint8 [nbytes] on our GPU; None when they cannot be had in this way, for which
        it takes half of the time at most, so that the other way has as much.

        Raises `TransferError`, when cancelled or of a locator that is none.
        """
        copy = source(manifest, locator)
        memory, view = self._pool.memory, self._pool.view
        taken = 0
        try:
            out = torch.empty(manifest.nbytes, dtype=torch.uint8, device=memory.device)

            def take(offset: int, nbytes: int) -> None:
                nonlocal taken
                # That the processor sees a transfer completed does not say that the GPU sees what it wrote: `flush`
                # does. A copy that is launched after that has the new bytes, and no kernel that runs already looks at
                # them. The sum below is of what was copied, and would find old ones.
                memory.flush()
                out[taken : taken + nbytes].copy_(view[offset : offset + nbytes])
                layout.settle((out,))  # the next transfer may write there as soon as this returns
                taken += nbytes

            now = time.monotonic()
            self._reader.read(copy, take, deadline=now + (deadline - now) / 2, cancelled=cancelled)
            if adds_up(out, locator.checksum):
                return out
            _log.info("%s: it has made room for a later one; it comes through host memory", copy.what)
        except torch.OutOfMemoryError:
            pass
        except (TransferError, GpuMemoryError) as error:
            if cancelled():
                raise
            self._leave_alone(locator.address)
            _log.warning("%s; handoffs from there go through host memory for %g s", error, _LEFT_ALONE_SECONDS)
        return None

    def _leave_alone(self, address: str) -> None:
        with self._lock:
            self._left_alone.pop(address, None)
            self._left_alone[address] = time.monotonic() + _LEFT_ALONE_SECONDS
            while len(self._left_alone) > _MOST_LEFT_ALONE:
                del self._left_alone[next(iter(self._left_alone))]

    def close(self) -> None:
        """Nothing of its own to give back."""
