"""Copies are read out of a peer's registered memory in chunks, two at a time, each one entry of its own batch.

They land in a receive reserve of registered memory of ours and are taken from there into memory that the payload owns.
So a copy may be larger than the reserve, and taking one chunk overlaps with the transfer of the next. What kind of
memory the reserve is in, and how a chunk is taken from it, is the carrier's business.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from triptych.errors import PoolFull, TransferError
from triptych.transport.data.carrier import within_pool
from triptych.transport.data.engine import Engine, Outcome, Transfer
from triptych.transport.data.pool import ALIGNMENT, Block, Pool
from triptych.wire.manifest import Locator, Manifest

MAX_CHUNK: Final = 16 << 20
MAX_RESERVE: Final = 64 << 20
_WINDOW: Final = 2
_ROOM_NAP: Final = 1e-3
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]%-]{1,255}")

Take: TypeAlias = Callable[[int, int], None]
"""Takes the next chunk: where it is in the reserve's memory, and its bytes. When it returns the place may be written
again."""


def reserve_bytes(pool_bytes: int) -> int:
    """How much of a pool is set aside for receiving: a quarter, at most 64 MiB."""
    return min(pool_bytes // 4, MAX_RESERVE)


@dataclass(frozen=True, slots=True)
class Landing:
    """Registered memory of ours, of which ``pool`` keeps the books under ``lock``, with a receive reserve."""

    pool: Pool
    lock: threading.Lock
    base: int
    """Its address."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk: all that are under way at once fit the reserve."""
        return min(MAX_CHUNK, reserve_bytes(self.pool.capacity) // _WINDOW // ALIGNMENT * ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Source:
    """A copy in the registered memory of a peer."""

    session: str
    address: int
    """In the peer's address space."""
    nbytes: int
    what: str
    """Names it in errors."""


def address_of(session: str, base: int) -> str:
    """What a locator says of registered memory at ``base`` of the engine that peers reach as ``session``."""
    return f"{session}/{base:x}"


def source(manifest: Manifest, locator: Locator) -> Source:
    """What a locator points to. Raises `TransferError` when it is no such place."""
    within_pool(manifest, locator, locator.pool_bytes)
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
        raise TransferError(f"{locator.plane}: {manifest.producer} sent an address that is none: {locator.address!r}")
    what = f"{locator.plane}: copy {manifest.copy} ({manifest.nbytes} bytes) of {manifest.producer} at {session}"
    return Source(session, address + locator.offset, manifest.nbytes, what)


@dataclass(eq=False, slots=True)
class _Chunk:
    block: Block
    transfer: Transfer
    retried: bool = False


class ChunkReader:
    """Reads copies of other processes into ``landing``. Thread-safe."""

    def __init__(self, engine: Engine, landing: Landing) -> None:
        self._engine = engine
        self._landing = landing
        self._chunk_bytes = landing.chunk_bytes

    def read(self, copy: Source, take: Take, *, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Have all bytes of a copy taken, in their order.

        Raises `TransferError`; when a transfer still goes on then, its destination is held back and ``drained`` false.
        """
        chunks: deque[_Chunk] = deque()
        position = 0
        try:
            while position < copy.nbytes or chunks:
                if position < copy.nbytes and len(chunks) < _WINDOW:
                    size = min(self._chunk_bytes, copy.nbytes - position)
                    block = self._room(size, bool(chunks), copy.what, deadline, cancelled)
                    if block is not None:
                        chunks.append(_Chunk(block, self._start(copy.session, copy.address + position, size, block)))
                        position += size
                        continue
                chunk = chunks[0]  # they are taken in their order
                try:
                    self._engine.wait(chunk.transfer, deadline=deadline, cancelled=cancelled, what=copy.what)
                except TransferError:
                    if not self._retry(chunk):
                        raise
                    continue
                take(chunk.block.offset, chunk.transfer.nbytes)
                chunks.popleft()
                with self._landing.lock:
                    self._landing.pool.free(chunk.block)
        except TransferError as error:
            raise TransferError(error.message, drained=self._abandon(chunks)) from error
        except BaseException:  # of who takes them
            self._abandon(chunks)
            raise

    def _retry(self, chunk: _Chunk) -> bool:
        """Begin a chunk anew whose transfer failed and is over, once.

        The engine keeps connections, also one to the life before this one of a sender that restarted on its port. It
        notices when it uses it, and makes a new one the next time.
        """
        failed = chunk.transfer
        if chunk.retried or failed.outcome is not Outcome.FAILED:
            return False
        chunk.retried = True
        chunk.transfer = self._start(failed.session, failed.remote, failed.nbytes, chunk.block)
        return True

    def _start(self, session: str, remote: int, size: int, block: Block) -> Transfer:
        landing = self._landing

        def on_late(outcome: Outcome) -> None:
            if outcome is not Outcome.LOST:
                with landing.lock:
                    landing.pool.free(block)

        transfer = Transfer(
            session=session, remote=remote, local=landing.base + block.offset, nbytes=size, on_late=on_late
        )
        self._engine.start(transfer)
        return transfer

    def _room(self, size: int, others: bool, what: str, deadline: float, cancelled: Callable[[], bool]) -> Block | None:
        """A destination for ``size`` bytes; None when there is none now and other chunks of ours may make room."""
        while True:
            try:
                with self._landing.lock:
                    return self._landing.pool.receive(size)
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
            with self._landing.lock:  # before anyone can call on_late, which takes the same lock
                match self._engine.abandon(chunk.transfer):
                    case Outcome.DONE | Outcome.FAILED:
                        self._landing.pool.free(chunk.block)
                    case Outcome.LOST | None:
                        self._landing.pool.quarantine(chunk.block)
                        drained = False
        return drained
