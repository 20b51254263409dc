"""Windows of tokens: as many on each rank, of tokens that there are, and each once at the places that are named."""

from __future__ import annotations

import itertools

import pytest
import torch

from triptych.accel.parallel.windows import once, window


@pytest.mark.parametrize("ranks", range(1, 9))
def test_ranks_have_equally_many_tokens_and_each_of_all_streams_stands_once(ranks: int) -> None:
    for lengths in itertools.product(range(1, 30), (1, 4, 7)):
        together: list[tuple[int, int]] = []
        for rank in range(ranks):
            for stream, length in enumerate(lengths):
                start, size = window(length, rank, ranks)
                assert size == -(-length // ranks)
                assert 0 <= start <= start + size <= length
                together += [(stream, token) for token in range(start, start + size)]
        places = once(lengths, ranks, torch.device("cpu"))
        assert (places is None) == all(length % ranks == 0 for length in lengths)
        seen = together if places is None else [together[place] for place in places.tolist()]
        assert sorted(seen) == [(stream, token) for stream, length in enumerate(lengths) for token in range(length)]


def test_a_stream_by_itself_comes_out_in_its_order() -> None:
    starts_sizes = [window(5, rank, 4) for rank in range(4)]
    assert starts_sizes == [(0, 2), (1, 2), (2, 2), (3, 2)]
    together = torch.cat([torch.arange(start, start + size) for start, size in starts_sizes])
    places = once([5], 4, torch.device("cpu"))
    assert places is not None
    assert together[places].tolist() == [0, 1, 2, 3, 4]
