"""Ring attention on two ranks: each holds half of the tokens, and the result is that of one up to rounding."""

from __future__ import annotations

import torch

from tests.worker.ranks.pair import Pair
from triptych.parallelism import Parallelism


def test_a_ring_of_two_agrees_with_one_process() -> None:
    pair = Pair(Parallelism(cfg=1, ring=2))
    try:
        alone, shared = pair.both(num_inference_steps=3)
        assert pair.tokens == 16  # of 32
        torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-5)
        # Nine tokens cannot go around: every rank computes all of them.
        alone, shared = pair.both(num_inference_steps=1, height=48, width=48, num_frames=1)
        assert pair.tokens == 9
        torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-5)
    finally:
        pair.close()
