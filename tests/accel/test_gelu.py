"""Which feed-forwards have their activation joined to a product, and which must stay as they are."""

from __future__ import annotations

import torch
from diffusers.models.attention import FeedForward
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from triptych.accel.gelu import FusedGelu, fuse_gelu


class Block(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.ffn = FeedForward(32, activation_fn=activation)


def test_a_plain_one_is_joined_to_its_projection() -> None:
    block = Block("gelu-approximate")
    assert fuse_gelu(block) == 1
    assert isinstance(block.ffn.net[0], FusedGelu)


def test_another_activation_is_left_alone() -> None:
    assert fuse_gelu(Block("gelu")) == 0


def test_an_adapted_projection_is_not_passed_by() -> None:
    block = Block("gelu-approximate")
    config = LoraConfig(r=2, target_modules=["net.0.proj"], init_lora_weights=False)
    adapted = inject_adapter_in_model(config, block)
    x = torch.randn(1, 3, 32)
    expected = adapted.ffn(x)
    assert fuse_gelu(adapted) == 0
    assert torch.equal(adapted.ffn(x), expected)
