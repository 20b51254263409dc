"""Ring attention on two ranks: each holds half of the tokens, and the result is that of one up to rounding."""

from __future__ import annotations

import logging

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from tests.worker.ranks.pair import Pair
from triptych.accel import attention
from triptych.accel.parallel.ring import use_ring_attention
from triptych.parallelism import Parallelism


def test_a_ring_of_two_agrees_with_one_process() -> None:
    pair = Pair(Parallelism(cfg=1, ring=2))
    try:
        alone, shared = pair.both(num_inference_steps=3)
        assert pair.tokens == 16  # of 32
        torch.testing.assert_close(alone, shared, rtol=1e-4, atol=5e-5)
        # Nine tokens cannot go around: every rank computes all of them.
        alone, shared = pair.both(num_inference_steps=1, height=48, width=48, num_frames=1)
        assert pair.tokens == 9
        torch.testing.assert_close(alone, shared, rtol=1e-4, atol=5e-5)
        for expected, shared in (pair.cancel_one_of_two(), pair.there_and_back()):
            torch.testing.assert_close(shared, expected, rtol=1e-4, atol=5e-5)
    finally:
        pair.close()


def test_a_backend_that_a_ring_cannot_use_is_named_with_what_takes_its_place(caplog: pytest.LogCaptureFixture) -> None:
    model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, ffn_dim=16, num_layers=1, text_dim=8)
    attention.use_backend(model, "native")
    with caplog.at_level(logging.WARNING, "triptych"):
        use_ring_attention(model, torch.device("cpu"))
    assert "runs on flash attention of the CPU, not on native" in caplog.text
    assert attention.in_use(model) == "ring"
