"""Handoffs between hosts: the receiver reads out of the sender's registered pool through the Mooncake engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from triptych.transport.data.carrier import Allocate
from triptych.transport.data.chunked import ChunkReader, Landing, address_of, source
from triptych.transport.data.engine import Engine
from triptych.transport.data.pieces import Intake
from triptych.transport.data.shm import Segment
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest

PLANE: Final = "mooncake"


class MooncakeCarrier:
    """Reads copies of other processes, from host memory to host memory. Thread-safe."""

    plane = PLANE

    def __init__(self, engine: Engine, landing: Landing, segment: Segment) -> None:
        self._address = address_of(engine.session, landing.base)
        self._segment = segment
        self._reader = ChunkReader(engine, landing)

    def locator(self, offset: int) -> Locator:
        """How a peer finds the copy at ``offset``: the engine's session, and where in our memory the pool starts."""
        return Locator(
            plane=self.plane,
            host=host_id(),
            address=self._address,
            offset=offset,
            pool_bytes=self._segment.nbytes,
        )

    def reaches(self, locator: Locator) -> bool:
        """Any host is within reach."""
        return locator.plane == self.plane

    def fetch(
        self,
        manifest: Manifest,
        locator: Locator,
        allocate: Allocate,
        *,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> Intake:
        """The bytes of a copy, each chunk digested as it is copied out.

        Raises `TransferError`; when a transfer still goes on then, its destination is held back and ``drained`` false.
        """
        copy = source(manifest, locator)
        out = allocate(manifest.nbytes)

        def take(offset: int, nbytes: int) -> None:
            out.append(self._segment.memory[offset : offset + nbytes].numpy())

        self._reader.read(copy, take, deadline=deadline, cancelled=cancelled)
        return out

    def close(self) -> None:
        """Nothing of its own to give back."""
