"""Handoffs between hosts: the receiver reads out of the sender's registered pool through the Mooncake engine.

A copy is read in chunks, two at a time, each one entry of its own batch: into the receive reserve of our pool, which is
registered, and from there into memory that the payload owns. So a copy may be larger than the reserve, and copying out
one chunk overlaps with the transfer of the next.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from triptych.errors import PoolFull, TransferError
from triptych.transport.data.carrier import Allocate, within_pool
from triptych.transport.data.engine import Engine, Outcome, Transfer
from triptych.transport.data.pieces import Intake
from triptych.transport.data.pool import ALIGNMENT, Block, Pool
from triptych.transport.data.settings import EngineSettings
from triptych.transport.data.shm import Segment
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest

MAX_CHUNK = 16 << 20
MAX_RESERVE = 64 << 20
_WINDOW = 2
_ROOM_NAP = 1e-3
_HOST = re.compile(r"[A-Za-z0-9._:\[\]%-]{1,255}")


def reserve_bytes(pool_bytes: int) -> int:
    """How much of a pool is set aside for receiving: a quarter, at most 64 MiB."""
    return min(pool_bytes // 4, MAX_RESERVE)


@dataclass(eq=False, slots=True)
class _Chunk:
    block: Block
    transfer: Transfer
    retried: bool = False


class MooncakeCarrier:
    """Reads copies of other processes through the engine. Thread-safe."""

    plane = "mooncake"

    def __init__(self, settings: EngineSettings, *, pool: Pool, lock: threading.Lock, segment: Segment) -> None:
        self._pool = pool
        self._lock = lock
        self._segment = segment
        self._base = segment.memory.data_ptr()
        self._chunk_bytes = min(MAX_CHUNK, reserve_bytes(segment.nbytes) // _WINDOW // ALIGNMENT * ALIGNMENT)
        self._engine = Engine(settings, segment.memory)

    def locator(self, offset: int) -> Locator:
        """How a peer finds the copy at ``offset``: the engine's session, and where in our memory the pool starts."""
        return Locator(
            plane=self.plane,
            host=host_id(),
            address=f"{self._engine.session}/{self._base:x}",
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
        within_pool(manifest, locator, locator.pool_bytes)
        session, base = _parse(manifest, locator)
        out = allocate(manifest.nbytes)
        chunks: deque[_Chunk] = deque()
        what = f"mooncake: copy {manifest.copy} ({manifest.nbytes} bytes) of {manifest.producer} at {session}"
        position = 0
        try:
            while position < manifest.nbytes or chunks:
                if position < manifest.nbytes and len(chunks) < _WINDOW:
                    size = min(self._chunk_bytes, manifest.nbytes - position)
                    block = self._room(size, bool(chunks), what, deadline, cancelled)
                    if block is not None:
                        remote = base + locator.offset + position
                        chunks.append(_Chunk(block, self._read(session, remote, size, block)))
                        position += size
                        continue
                chunk = chunks[0]  # they are taken in their order
                try:
                    self._engine.wait(chunk.transfer, deadline=deadline, cancelled=cancelled, what=what)
                except TransferError:
                    if not self._retry(chunk):
                        raise
                    continue
                memory = self._segment.memory[chunk.block.offset : chunk.block.offset + chunk.transfer.nbytes]
                out.append(memory.numpy())
                chunks.popleft()
                with self._lock:
                    self._pool.free(chunk.block)
        except TransferError as error:
            raise TransferError(error.message, drained=self._abandon(chunks)) from error
        return out

    def _retry(self, chunk: _Chunk) -> bool:
        """Begin a chunk anew whose transfer failed and is over, once.

        The engine keeps connections, also one to the life before this one of a sender that restarted on its port. It
        notices when it uses it, and makes a new one the next time.
        """
        failed = chunk.transfer
        if chunk.retried or failed.outcome is not Outcome.FAILED:
            return False
        chunk.retried = True
        chunk.transfer = self._read(failed.session, failed.remote, failed.nbytes, chunk.block)
        return True

    def _read(self, session: str, remote: int, size: int, block: Block) -> Transfer:
        def on_late(outcome: Outcome) -> None:
            if outcome is not Outcome.LOST:
                with self._lock:
                    self._pool.free(block)

        transfer = Transfer(
            session=session, remote=remote, local=self._base + block.offset, nbytes=size, on_late=on_late
        )
        self._engine.start(transfer)
        return transfer

    def _room(self, size: int, others: bool, what: str, deadline: float, cancelled: Callable[[], bool]) -> Block | None:
        """A destination for ``size`` bytes; None when there is none now and other chunks of ours may make room."""
        while True:
            try:
                with self._lock:
                    return self._pool.receive(size)
            except PoolFull as full:
                if others:
                    return None
                if cancelled():
                    raise TransferError(f"{what}: the pull was cancelled") from full
                if time.monotonic() >= deadline:
                    raise TransferError(f"{what}: {full.message}") from full
            time.sleep(_ROOM_NAP)

    def _abandon(self, chunks: deque[_Chunk]) -> bool:
        """Free what is over, hold back what is not; whether everything is over."""
        drained = True
        for chunk in chunks:
            with self._lock:  # before anyone can call on_late, which takes the same lock
                match self._engine.abandon(chunk.transfer):
                    case Outcome.DONE | Outcome.FAILED:
                        self._pool.free(chunk.block)
                    case Outcome.LOST | None:
                        self._pool.quarantine(chunk.block)
                        drained = False
        return drained

    def close(self) -> None:
        """Unregister the pool and stop."""
        self._engine.close()


def _parse(manifest: Manifest, locator: Locator) -> tuple[str, int]:
    session, _, base = locator.address.rpartition("/")
    host, _, port = session.rpartition(":")
    try:
        address = int(base, 16)
    except ValueError:
        address = 0
    # The engine takes what it is given: an address beyond 64 bits is an exception there, on a thread of its own.
    if not (
        _HOST.fullmatch(host)
        and port.isascii()
        and port.isdecimal()
        and 0 < int(port) < 1 << 16
        and address > 0
        and address + locator.pool_bytes < 1 << 63
    ):
        raise TransferError(f"mooncake: {manifest.producer} sent an address that is none: {locator.address!r}")
    return session, address
