"""Copies in pieces: the bytes, the checksum that both ends must agree on, and the threads that share the work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash

from triptych.transport.data.pieces import Bytes, Hands, Intake, checksum, hands_for
from triptych.wire.manifest import PIECE_BYTES

SIZES = (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 9 * PIECE_BYTES + 77)
WAIT = 60


@pytest.fixture(params=[1, 4])
def hands(request: pytest.FixtureRequest) -> Iterator[Hands]:
    hands = Hands(request.param)
    yield hands
    hands.close()


@pytest.fixture
def four() -> Iterator[Hands]:
    hands = Hands(4)
    yield hands
    hands.close()


def noise(nbytes: int) -> Bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def taken(source: Bytes, hands: Hands, chunk: int) -> Intake:
    """An intake that got the source in chunks."""
    intake = Intake(torch.empty(len(source), dtype=torch.uint8), hands)
    for start in range(0, len(source), chunk):
        intake.append(source[start : start + chunk])
    return intake


@pytest.mark.parametrize("chunk", [PIECE_BYTES // 2 + 64, PIECE_BYTES, 3 * PIECE_BYTES - 64, 100 * PIECE_BYTES])
@pytest.mark.parametrize("nbytes", SIZES)
def test_whatever_way_the_bytes_come_they_are_the_same_and_so_is_their_checksum(
    hands: Hands, nbytes: int, chunk: int
) -> None:
    source = noise(nbytes)
    intake = taken(source, hands, chunk)
    assert np.array_equal(intake.memory.numpy(), source)
    assert intake.checksum() == checksum(source, hands)


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_checksum_is_the_one_that_manifest_describes(hands: Hands, nbytes: int) -> None:
    data = bytes(noise(nbytes))
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, nbytes, PIECE_BYTES)]
    digests = b"".join(xxhash.xxh3_64_intdigest(piece).to_bytes(8, "big") for piece in pieces)
    assert checksum(noise(nbytes), hands) == xxhash.xxh3_64_intdigest(digests)


def test_the_checksum_stays_what_other_builds_compute(hands: Hands) -> None:
    """If it must change, so must the version of the protocol."""
    data = np.arange(1 << 19, dtype=np.uint32).view(np.uint8)
    assert checksum(data[:-13], hands) == 9336482003461743253


@pytest.mark.parametrize("place", [0, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 76])
def test_a_changed_byte_is_another_checksum(hands: Hands, place: int) -> None:
    data = noise(3 * PIECE_BYTES + 77)
    before = checksum(data, hands)
    data[place] ^= 1
    assert checksum(data, hands) != before


def test_pieces_that_changed_places_or_are_missing_are_another_checksum(hands: Hands) -> None:
    data = noise(4 * PIECE_BYTES)
    first, second, rest = data[:PIECE_BYTES], data[PIECE_BYTES : 2 * PIECE_BYTES], data[2 * PIECE_BYTES :]
    sums = {
        checksum(np.concatenate(parts), hands)
        for parts in ((first, second, rest), (second, first, rest), (first, second), (first,), (rest,), (first, rest))
    }
    assert len(sums) == 6
    assert checksum(data[:-1], hands) not in sums


def test_several_threads_share_a_large_copy(four: Hands) -> None:
    together = threading.Barrier(4)

    def work(item: int) -> None:
        if item < 4:  # each waits for three others, so that no thread gets two of them
            together.wait(WAIT)

    four.each(work, range(8))


def test_a_small_copy_is_the_callers_own(four: Hands) -> None:
    threads: set[int] = set()
    for _ in range(50):
        four.each(lambda _: threads.add(threading.get_ident()), range(3))
    assert threads == {threading.get_ident()}


def test_a_copy_does_not_wait_for_threads_that_have_no_time(four: Hands) -> None:
    busy, end = threading.Barrier(5), threading.Event()

    def hold(item: int) -> None:
        if item < 4:
            busy.wait(WAIT)
            end.wait(WAIT)

    other = threading.Thread(target=four.each, args=(hold, range(8)))
    other.start()
    busy.wait(WAIT)
    done: list[int] = []
    try:
        four.each(done.append, range(100))
    finally:
        end.set()
        other.join(WAIT)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_an_error_in_any_thread_reaches_the_caller_when_nobody_is_at_work(four: Hands, where: str) -> None:
    me = threading.get_ident()
    together = threading.Barrier(4)
    begun: list[int] = []
    ended: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        try:
            if item < 4:
                together.wait(WAIT)
            if (threading.get_ident() == me) == (where == "caller"):
                raise MemoryError("no room")
        finally:
            ended.append(item)

    with pytest.raises(MemoryError, match="no room"):
        four.each(work, range(8))
    assert sorted(begun) == sorted(ended)


def test_closed_hands_leave_no_thread_and_copies_go_on_without() -> None:
    before = set(threading.enumerate())
    hands = Hands(4)
    source = noise(9 * PIECE_BYTES)
    intake = taken(source, hands, len(source))
    hands.close()
    assert set(threading.enumerate()) <= before
    assert taken(source, hands, len(source)).checksum() == intake.checksum()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (64, 4)])
def test_half_of_the_cores_share_a_copy_and_four_at_most(cores: int, threads: int) -> None:
    together = threading.Barrier(threads)
    hands = hands_for(cores)
    seen: set[int] = set()

    def work(item: int) -> None:
        if item < threads:
            together.wait(WAIT)
        seen.add(threading.get_ident())

    hands.each(work, range(64))
    hands.close()
    assert len(seen) == threads
