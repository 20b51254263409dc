"""LoRA adapters on two ranks: each request has its own, on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.pipeline.harness import latents, post
from tests.worker.ranks.pair import SMALL, Pair, Ranks
from triptych.config import Lora
from triptych.ids import Role
from triptych.parallelism import Parallelism

LAYERS = {"blocks.0.attn1.to_q": (256, 256), "blocks.1.ffn.net.2": (256, 1024), "blocks.1.attn2.to_v": (256, 256)}
CHOICES = (None, "fox", "fox:0.5")


@pytest.fixture
def lora(tmp_path: Path) -> Lora:
    random = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for layer, (wide, narrow) in LAYERS.items():
        tensors[f"transformer.{layer}.lora_A.weight"] = torch.randn(4, narrow, generator=random) / narrow**0.5
        tensors[f"transformer.{layer}.lora_B.weight"] = torch.randn(wide, 4, generator=random) / 2
    save_file(tensors, tmp_path / "fox.safetensors")
    return Lora(name="fox", path=str(tmp_path / "fox.safetensors"))


@pytest.mark.parametrize("way", ["cfg", "ulysses"])
def test_each_request_has_its_own_adapters_on_every_rank(lora: Lora, way: str) -> None:
    pair = Pair(Parallelism(cfg=2) if way == "cfg" else Parallelism(cfg=1, ulysses=2), (lora,))
    try:
        seen: list[torch.Tensor] = []
        for choice in CHOICES:
            alone, shared = pair.both(num_inference_steps=3, lora=choice)
            if way == "cfg":
                assert torch.equal(alone, shared)
            else:
                torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-5)
            assert not any(torch.allclose(shared, other, atol=1e-2) for other in seen), f"{choice} changed nothing"
            seen.append(shared)
        assert torch.equal(interleaved(pair)[1], seen[1])
    finally:
        pair.close()


def interleaved(pair: Pair) -> list[torch.Tensor]:
    """Latents of a request for each choice, whose denoisers take turns, a step each."""
    made: list[torch.Tensor] = []
    begun = [pair.encoded(num_inference_steps=3, lora=choice) for choice in CHOICES]
    runs = [pair.shared.start(Role.DENOISER, whole, inbox[Role.DENOISER], []) for whole, inbox in begun]
    for _ in range(3):
        results = [run.advance() for run in runs]
    for result, (_, inbox) in zip(results, begun, strict=True):
        assert result is not None
        post(result, inbox)
        made.append(latents(inbox))
    return made


def test_a_shared_decoder_serves_beside_adapters(lora: Lora, tmp_path: Path) -> None:
    """It has nothing of them to share."""
    ranks = Ranks(Parallelism(decoder_tp=2), roles=(Role.DECODER,), loras=(lora,))
    try:
        for alone, shared in ranks.compared(Role.DECODER, SMALL | {"num_inference_steps": 2} | {"lora": "fox"}):
            assert (alone.int() - shared.int()).abs().max() <= 1
    finally:
        ranks.close()
