"""Ring attention on two ranks: each holds half of the tokens, and the result is that of one up to rounding."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline  # pyright: ignore[reportPrivateImportUsage]  # documented
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from tests.pipeline.checkpoints import wan_parts, wan_transformer
from tests.worker.ranks.pair import SMALL, Pair, Ranks
from triptych.accel import attention
from triptych.accel.parallel.ring import RingAttention
from triptych.ids import Role
from triptych.parallelism import Parallelism


def test_a_ring_of_two_agrees_with_one_process() -> None:
    pair = Pair(Parallelism(cfg=1, ring=2))
    try:
        alone, shared = pair.both(num_inference_steps=3)
        assert pair.tokens == 16  # of 32
        torch.testing.assert_close(alone, shared, rtol=1e-4, atol=5e-5)
        alone, shared = pair.both(num_inference_steps=3, height=48, width=48, num_frames=1)
        assert pair.tokens == 5  # of 9
        assert not pair.tally.unshared_forwards
        torch.testing.assert_close(alone, shared, rtol=1e-4, atol=5e-5)
        for expected, shared in (pair.cancel_one_of_two(), pair.there_and_back()):
            torch.testing.assert_close(shared, expected, rtol=1e-4, atol=5e-5)
    finally:
        pair.close()


def test_a_backend_that_a_ring_cannot_use_is_named_with_what_takes_its_place(caplog: pytest.LogCaptureFixture) -> None:
    model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, ffn_dim=16, num_layers=1, text_dim=8)
    attention.use_backend(model, "native")
    with caplog.at_level(logging.WARNING, "triptych"):
        ring = RingAttention(model, torch.device("cpu"))
    assert "runs on flash attention of the CPU, not on native" in caplog.text
    with ring.used():
        assert attention.in_use(model) == "ring"
    assert attention.in_use(model) == "native"
    ring.use()
    assert attention.in_use(model) == "ring"


def test_a_ring_that_only_unguided_forwards_need_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    parts = wan_parts()
    WanPipeline(**parts, transformer=wan_transformer(num_attention_heads=3)).save_pretrained(tmp_path)
    ranks = Ranks(Parallelism(), path=str(tmp_path), roles=(Role.DENOISER,))
    try:
        assert "ring 2" in ranks.shared.fingerprint
        backends: list[str | None] = []
        transformer = ranks.rank0.component(Role.DENOISER, "transformer")
        transformer.blocks[0].register_forward_pre_hook(lambda *_: backends.append(attention.in_use(transformer)))
        for scale in (4.0, 1.0):
            backends.clear()
            request = SMALL | {"num_inference_steps": 2, "guidance_scale": scale}
            for alone, shared in ranks.compared(Role.DENOISER, request):
                if scale == 1.0:
                    torch.testing.assert_close(alone, shared, rtol=1e-4, atol=5e-5)
                else:
                    assert torch.equal(alone, shared)
            assert {*backends} == ({"ring"} if scale == 1.0 else {"native"})
    finally:
        ranks.close()
