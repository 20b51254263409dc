"""A carrier for handoffs between two roles of one instance: it reads the instance's own pool."""

from __future__ import annotations

import threading
from collections.abc import Callable

from triptych.errors import TransferError
from triptych.ids import Epoch
from triptych.transport.data.carrier import Allocate, within_pool
from triptych.transport.data.pieces import Intake
from triptych.transport.data.pool import Pool
from triptych.transport.data.shm import Segment
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest


class OwnCarrier:
    """Copies out of the instance's own pool, for a handoff between two roles of one instance."""

    plane = "local"

    def __init__(self, pool: Pool, lock: threading.Lock, segment: Segment, epoch: Epoch) -> None:
        self._pool = pool
        self._lock = lock
        self._segment = segment
        self._epoch = epoch

    def locator(self, offset: int) -> Locator:
        """How we find our own copy again."""
        return Locator(
            plane=self.plane,
            host=host_id(),
            address=self._epoch,
            offset=offset,
            pool_bytes=self._segment.nbytes,
        )

    def reaches(self, locator: Locator) -> bool:
        """Whether the copy was staged in this life of this instance."""
        return locator.plane == self.plane and locator.address == self._epoch

    def fetch(
        self,
        manifest: Manifest,
        locator: Locator,
        allocate: Allocate,
        *,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> Intake:
        """The bytes of our own copy, pinned while it is read."""
        with self._lock:
            block = self._pool.pin(manifest.copy)
        if block is None:
            raise TransferError(f"local: copy {manifest.copy} ({manifest.nbytes} bytes) is not kept any more")
        try:
            within_pool(manifest, locator, self._segment.nbytes)
            if block.offset != locator.offset or block.size < manifest.nbytes:
                raise TransferError(f"local: copy {manifest.copy} is not where its manifest says")
            out = allocate(manifest.nbytes)
            out.append(self._segment.memory[block.offset : block.offset + manifest.nbytes].numpy())
            return out
        finally:
            with self._lock:
                self._pool.unpin(manifest.copy)

    def close(self) -> None:
        """Nothing of its own to give back."""
