"""The books of a pool, against a simple model, under every order of events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from triptych.errors import PoolFull, TooLarge
from triptych.ids import CopyId
from triptych.transport.data.pool import ALIGNMENT, Block, Pool, align

CAPACITY = 64 * ALIGNMENT
RESERVE = 16 * ALIGNMENT


def copy_id(number: int) -> CopyId:
    return CopyId(str(number))


def stage(pool: Pool, number: int, nbytes: int, *, keep_pinned: bool = False) -> Block:
    block = pool.stage(copy_id(number), nbytes)
    if not keep_pinned:
        pool.unpin(copy_id(number))
    return block


def test_blocks_are_aligned_and_of_true_size() -> None:
    pool = Pool(CAPACITY)
    first, second = stage(pool, 1, 1), stage(pool, 2, ALIGNMENT + 1)
    assert (first.offset, first.size) == (0, ALIGNMENT)
    assert (second.offset, second.size) == (ALIGNMENT, 2 * ALIGNMENT)
    assert pool.used_bytes == 3 * ALIGNMENT


def test_freed_neighbours_merge_so_that_the_whole_pool_can_be_used_again() -> None:
    pool = Pool(CAPACITY)
    for number in range(64):
        stage(pool, number, ALIGNMENT)
    for number in [*range(0, 64, 2), *range(1, 64, 2)]:
        pool.release(copy_id(number))
    assert stage(pool, 99, CAPACITY).size == CAPACITY
    assert pool.take_dropped() == ()


def test_spare_copies_go_before_older_ones_and_displace_only_their_like() -> None:
    pool = Pool(CAPACITY)
    quarter = CAPACITY // 4
    stage(pool, 1, quarter)
    for number in (2, 3):
        pool.stage(copy_id(number), quarter, spare=True)
        pool.unpin(copy_id(number))
    stage(pool, 4, quarter)
    pool.stage(copy_id(5), quarter, spare=True)
    pool.unpin(copy_id(5))
    assert pool.take_dropped() == (copy_id(2),)
    stage(pool, 6, 2 * quarter)
    assert pool.take_dropped() == (copy_id(3), copy_id(5))
    with pytest.raises(PoolFull):
        pool.stage(copy_id(7), quarter, spare=True)
    stage(pool, 8, quarter)
    assert pool.take_dropped() == (copy_id(1),)
    pool.check_integrity()


def test_a_copy_that_can_never_fit_names_both_sizes_and_drops_nothing() -> None:
    pool = Pool(CAPACITY, RESERVE)
    stage(pool, 1, ALIGNMENT)
    with pytest.raises(TooLarge, match=rf"{CAPACITY}.*{CAPACITY - RESERVE}"):
        pool.stage(copy_id(2), CAPACITY)
    assert pool.staged() == (copy_id(1),)


def test_the_oldest_copies_are_dropped_first_and_no_more_than_needed() -> None:
    pool = Pool(CAPACITY)
    for number in range(4):
        stage(pool, number, CAPACITY // 4)
    stage(pool, 4, CAPACITY // 2)
    assert pool.take_dropped() == (copy_id(0), copy_id(1))
    assert pool.take_dropped() == ()
    assert pool.staged() == (copy_id(2), copy_id(3), copy_id(4))


def test_a_pinned_copy_is_never_dropped_and_a_hopeless_request_drops_nothing() -> None:
    pool = Pool(CAPACITY)
    stage(pool, 0, CAPACITY // 4)
    stage(pool, 1, CAPACITY // 4, keep_pinned=True)
    stage(pool, 2, CAPACITY // 2)
    with pytest.raises(PoolFull, match="no room"):
        pool.stage(copy_id(3), CAPACITY)
    assert pool.take_dropped() == ()
    pool.unpin(copy_id(1))
    stage(pool, 3, CAPACITY)
    assert pool.take_dropped() == (copy_id(0), copy_id(1), copy_id(2))


def test_a_copy_released_while_it_is_read_is_freed_when_the_reader_is_done() -> None:
    pool = Pool(CAPACITY)
    stage(pool, 1, CAPACITY)
    assert pool.pin(copy_id(1)) is not None
    pool.release(copy_id(1))
    assert pool.pin(copy_id(1)) is None
    assert pool.staged() == ()
    assert pool.used_bytes == CAPACITY
    pool.unpin(copy_id(1))
    assert pool.used_bytes == 0


def test_a_pool_full_of_outputs_can_still_receive() -> None:
    pool = Pool(CAPACITY, RESERVE)
    stage(pool, 1, CAPACITY - RESERVE, keep_pinned=True)
    block = pool.receive(RESERVE)
    with pytest.raises(PoolFull):
        pool.receive(ALIGNMENT)
    pool.free(block)
    pool.receive(ALIGNMENT)


def test_a_receive_beyond_the_reserve_drops_an_output() -> None:
    pool = Pool(CAPACITY, RESERVE)
    stage(pool, 1, CAPACITY - RESERVE)
    pool.receive(2 * RESERVE)
    assert pool.take_dropped() == (copy_id(1),)


def test_a_quarantined_block_is_given_to_nobody_until_it_is_freed() -> None:
    pool = Pool(CAPACITY, RESERVE)
    block = pool.receive(RESERVE)
    pool.quarantine(block)
    assert pool.quarantined_bytes == RESERVE
    stage(pool, 1, CAPACITY - RESERVE, keep_pinned=True)
    with pytest.raises(PoolFull, match=f"{RESERVE} held back"):
        pool.receive(ALIGNMENT)
    pool.free(block)
    assert pool.receive(RESERVE) == block


def test_a_copy_without_bytes_takes_no_room() -> None:
    pool = Pool(CAPACITY)
    stage(pool, 1, CAPACITY)
    stage(pool, 2, 0)
    assert pool.staged() == (copy_id(1), copy_id(2))
    pool.release(copy_id(2))
    pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Every order of staging, pinning, releasing, receiving, quarantining and freeing."""

    copies: Bundle[CopyId] = Bundle("copies")
    pinned: Bundle[CopyId] = Bundle("pinned")
    received: Bundle[Block] = Bundle("received")
    quarantined: Bundle[Block] = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(CAPACITY, RESERVE)
        self.numbers = itertools.count()
        self.owned: dict[CopyId, Block] = {}
        self.pins: dict[CopyId, int] = {}
        self.blocks: set[Block] = set()
        self.spare: set[CopyId] = set()

    def _forget_dropped(self, *, spare_only: bool = False) -> None:
        dropped = self.pool.take_dropped()
        for copy in dropped:
            assert not self.pins.get(copy), "a pinned copy was dropped"
            del self.owned[copy]
        if not self.spare.issuperset(dropped):
            assert not spare_only, "a spare copy has displaced another"
            left = [copy for copy in self.spare & self.owned.keys() if self.owned[copy].size and not self.pins[copy]]
            assert not left, "spare copies go first"

    @rule(target=pinned, nbytes=st.integers(0, CAPACITY + ALIGNMENT), spare=st.booleans())
    def stage(self, nbytes: int, spare: bool) -> object:
        copy = copy_id(next(self.numbers))
        try:
            block = self.pool.stage(copy, nbytes, spare=spare)
        except TooLarge:
            assert align(nbytes) > CAPACITY - RESERVE
            return multiple()
        except PoolFull:
            assert self.pool.take_dropped() == ()
            return multiple()
        self._forget_dropped(spare_only=spare)
        if spare:
            self.spare.add(copy)
        self.owned[copy] = block
        self.pins[copy] = 1
        return copy

    @rule(target=copies, copy=consumes(pinned))
    def unpin(self, copy: CopyId) -> CopyId:
        self.pool.unpin(copy)
        self.pins[copy] -= 1
        if copy not in self.pool.staged() and not self.pins[copy]:
            self.owned.pop(copy, None)
        return copy

    @rule(target=pinned, copy=copies)
    def pin(self, copy: CopyId) -> object:
        block = self.pool.pin(copy)
        if block is None:
            return multiple()
        assert block == self.owned[copy]
        self.pins[copy] += 1
        return copy

    @rule(copy=copies)
    def release(self, copy: CopyId) -> None:
        self.pool.release(copy)
        assert copy not in self.pool.staged()
        if not self.pins[copy]:
            self.owned.pop(copy, None)

    @rule(target=received, nbytes=st.integers(1, CAPACITY + ALIGNMENT))
    def receive(self, nbytes: int) -> object:
        try:
            block = self.pool.receive(nbytes)
        except (PoolFull, TooLarge):
            assert self.pool.take_dropped() == ()
            return multiple()
        self._forget_dropped()
        self.blocks.add(block)
        return block

    @rule(block=consumes(received))
    def free(self, block: Block) -> None:
        self.pool.free(block)
        self.blocks.remove(block)

    @rule(target=quarantined, block=consumes(received))
    def quarantine(self, block: Block) -> Block:
        self.pool.quarantine(block)
        return block

    @rule(block=consumes(quarantined))
    def drained(self, block: Block) -> None:
        self.pool.free(block)
        self.blocks.remove(block)

    @invariant()
    def nothing_overlaps_and_every_byte_is_accounted_for(self) -> None:
        self.pool.check_integrity()
        taken = sorted(
            [block for block in self.owned.values() if block.size] + list(self.blocks), key=lambda block: block.offset
        )
        for left, right in itertools.pairwise(taken):
            assert left.offset + left.size <= right.offset
        assert self.pool.used_bytes == sum(block.size for block in taken)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
