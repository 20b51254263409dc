"""The books of a pool of memory: who owns which bytes. Pure bookkeeping; it never touches the memory itself.

The pool has two arenas. Outputs are staged in the first; the second is a reserve in which only pulled bytes land, so
that an instance whose pool is full of outputs can still receive, finish, and thereby free room elsewhere. A receive
that does not fit the reserve may use the first arena too, and like a stage it may drop retained copies to get room.

A block's life: staged blocks are *pinned* while someone writes or reads them, else *retained* and droppable, spare ones
before the others, oldest first. Received blocks are freed when their bytes have been copied out, or *quarantined* when
a transfer into them was given up but may still write: they return only when it is certain to be over.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import PoolFull, TooLarge
from triptych.ids import CopyId

ALIGNMENT = 64
"""Blocks and tensors start on multiples of this many bytes: a cache line, and enough for every dtype."""


def align(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Block:
    """``size`` bytes at ``offset``; size is the true capacity, a multiple of the alignment."""

    offset: int
    size: int


class Arena:
    """First-fit allocation in ``[base, base + size)`` with neighbours merged on free."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self._free: list[Block] = [Block(base, size)] if size else []

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated, in however many pieces."""
        return sum(block.size for block in self._free)

    def owns(self, block: Block) -> bool:
        """Whether the block lies in this arena."""
        return self.base <= block.offset < self.base + self.size

    def take(self, size: int) -> Block | None:
        """The first free piece of ``size`` aligned bytes, or None."""
        for index, free in enumerate(self._free):
            if free.size >= size:
                rest = Block(free.offset + size, free.size - size)
                self._free[index : index + 1] = [rest] if rest.size else []
                return Block(free.offset, size)
        return None

    def give(self, block: Block) -> None:
        """Return a block that `take` gave."""
        index = bisect.bisect(self._free, block.offset, key=lambda free: free.offset)
        start, end = block.offset, block.offset + block.size
        low = high = index
        if index and self._free[index - 1].offset + self._free[index - 1].size == start:
            low, start = index - 1, self._free[index - 1].offset
        if index < len(self._free) and self._free[index].offset == end:
            high, end = index + 1, end + self._free[index].size
        self._free[low:high] = [Block(start, end - start)]

    def clone(self) -> Arena:
        """The same books once more."""
        clone = Arena(self.base, self.size)
        clone._free = list(self._free)
        return clone

    def free_blocks(self) -> tuple[Block, ...]:
        """The free pieces by offset."""
        return tuple(self._free)


@dataclass(slots=True)
class _Staged:
    block: Block | None
    """None for a copy of no bytes."""
    pins: int
    spare: bool
    """Dropped before those that are not."""
    released: bool = False
    """Released while pinned: freed at the last unpin."""


class Pool:
    """Books over ``capacity`` bytes, of which the last ``reserve`` are for receiving only. Not thread-safe."""

    def __init__(self, capacity: int, reserve: int = 0) -> None:
        self.capacity = capacity - capacity % ALIGNMENT
        reserve = align(reserve)
        self._stage = Arena(0, self.capacity - reserve)
        self._receive = Arena(self.capacity - reserve, reserve)
        self._staged: dict[CopyId, _Staged] = {}
        self._received: set[Block] = set()
        self._quarantined: set[Block] = set()
        self._dropped: list[CopyId] = []
        self.peak_bytes = 0
        """Most that was ever taken."""
        self.refusals = 0
        """How often there was no room; who waits for room asks several times."""

    @property
    def stage_capacity(self) -> int:
        """Bytes of the largest copy that can ever be staged."""
        return self._stage.size

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken: staged, being received, or quarantined."""
        return self.capacity - self._stage.free_bytes - self._receive.free_bytes

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that an unfinished transfer may still write to."""
        return sum(block.size for block in self._quarantined)

    # -- staged copies -----------------------------------------------------------------------------------------

    def stage(self, copy: CopyId, nbytes: int, *, spare: bool = False) -> Block:
        """Room for a copy, pinned once until `unpin`. Drops retained copies when it must: spare ones first, and for a
        ``spare`` copy none but those.

        Raises `TooLarge` when it can never fit and `PoolFull` when it does not fit now; then nothing was dropped.
        """
        size = align(nbytes)
        if size > self._stage.size:
            raise TooLarge(f"a handoff of {nbytes} bytes does not fit a transfer pool that stages {self._stage.size}")
        if not size:
            self._staged[copy] = _Staged(None, pins=1, spare=spare)
            return Block(0, 0)
        block = self._take_or_drop(size, spare_only=spare)
        if block is None:
            self.refusals += 1
            raise PoolFull(
                f"no room for a handoff of {nbytes} bytes: {self._stage.free_bytes} of {self._stage.size} bytes of the "
                "transfer pool are free, and what could be dropped does not make enough room in one piece"
            )
        self._staged[copy] = _Staged(block, pins=1, spare=spare)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return block

    def pin(self, copy: CopyId) -> Block | None:
        """Keep a copy from being dropped or freed until `unpin`; its block, or None when it is not staged."""
        staged = self._staged.get(copy)
        if staged is None or staged.released:
            return None
        staged.pins += 1
        return staged.block or Block(0, 0)

    def unpin(self, copy: CopyId) -> None:
        """Undo one pin; frees a copy that was released meanwhile."""
        staged = self._staged[copy]
        staged.pins -= 1
        if staged.released and not staged.pins:
            self._forget(copy)

    def release(self, copy: CopyId) -> None:
        """Free a copy, at the latest when nobody reads it any more. Unknown ones are ignored."""
        staged = self._staged.get(copy)
        if staged is None:
            return
        staged.released = True
        if not staged.pins:
            self._forget(copy)

    def staged(self) -> tuple[CopyId, ...]:
        """The copies that can be pulled, oldest first."""
        return tuple(copy for copy, staged in self._staged.items() if not staged.released)

    def take_dropped(self) -> tuple[CopyId, ...]:
        """Copies dropped for room since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _forget(self, copy: CopyId) -> None:
        block = self._staged.pop(copy).block
        if block is not None:
            self._stage.give(block)

    # -- receiving ---------------------------------------------------------------------------------------------

    def receive(self, nbytes: int) -> Block:
        """Room for bytes that a transfer will write: in the reserve, else among the outputs.

        Raises `TooLarge` when no arena could ever hold it and `PoolFull` when there is no room now.
        """
        size = align(nbytes)
        if size > max(self._receive.size, self._stage.size):
            raise TooLarge(f"a transfer of {nbytes} bytes does not fit a pool of {self.capacity}")
        block = self._receive.take(size)
        if block is None and size <= self._stage.size:
            block = self._take_or_drop(size)
        if block is None:
            self.refusals += 1
            raise PoolFull(
                f"no room to receive {nbytes} bytes: {self.capacity - self.used_bytes} of {self.capacity} bytes free, "
                f"{self.quarantined_bytes} held back for transfers that are not over"
            )
        self._received.add(block)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give back a received block, or a quarantined one whose transfer is over at last."""
        if block in self._quarantined:
            self._quarantined.remove(block)
        else:
            self._received.remove(block)
        (self._receive if self._receive.owns(block) else self._stage).give(block)

    def quarantine(self, block: Block) -> None:
        """Hold a received block back: a transfer that was given up may still write to it."""
        self._received.remove(block)
        self._quarantined.add(block)

    # -- pressure ----------------------------------------------------------------------------------------------

    def _take_or_drop(self, size: int, *, spare_only: bool = False) -> Block | None:
        block = self._stage.take(size)
        if block is not None:
            return block
        victims = self._victims(size, spare_only=spare_only)
        for copy in victims:
            self._forget(copy)
            self._dropped.append(copy)
        return self._stage.take(size) if victims else None

    def _victims(self, size: int, *, spare_only: bool) -> tuple[CopyId, ...]:
        """The fewest oldest unpinned copies whose going makes ``size`` bytes in one piece, spare ones first; none if
        none do.

        Tried on a copy of the books, so that a request that cannot be met costs nobody their output.
        """
        trial = self._stage.clone()
        victims: list[CopyId] = []
        for copy, staged in sorted(self._staged.items(), key=lambda item: not item[1].spare):
            if staged.pins or staged.block is None or (spare_only and not staged.spare):
                continue
            trial.give(staged.block)
            victims.append(copy)
            if any(free.size >= size for free in trial.free_blocks()):
                return tuple(victims)
        return ()

    # -- invariants --------------------------------------------------------------------------------------------

    def _blocks(self) -> Iterator[Block]:
        yield from self._stage.free_blocks()
        yield from self._receive.free_blocks()
        yield from (staged.block for staged in self._staged.values() if staged.block is not None)
        yield from self._received
        yield from self._quarantined

    def check_integrity(self) -> None:
        """Raise AssertionError unless every byte has exactly one owner and free neighbours are merged."""
        position = 0
        for block in sorted(self._blocks(), key=lambda block: block.offset):
            assert block.size > 0, f"empty block {block}"
            assert block.offset == position, f"bytes {position} to {block.offset} have no owner or two"
            assert block.offset % ALIGNMENT == 0, f"{block} is not aligned"
            assert block.size % ALIGNMENT == 0, f"{block} is not aligned"
            position += block.size
        assert position == self.capacity, f"{self.capacity - position} bytes at the end have no owner or two"
        for arena in (self._stage, self._receive):
            free = arena.free_blocks()
            for left, right in itertools.pairwise(free):
                assert left.offset + left.size < right.offset, f"free neighbours {left} and {right} are not merged"
        for copy, staged in self._staged.items():
            assert staged.pins >= 0, f"{copy} has {staged.pins} pins"
            assert staged.pins or not staged.released, f"{copy} is released and still here"
