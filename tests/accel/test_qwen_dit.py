"""Qwen-Image's transformer computes the same with a rotation in real numbers and without a mask that hides none."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

from triptych.accel import qwen_dit


@pytest.fixture
def model() -> QwenImageTransformer2DModel:
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
    ).eval()


def forward(model: QwenImageTransformer2DModel, mask: Tensor | None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return model(
        hidden_states=torch.randn(1, 12, 64, generator=generator),
        encoder_hidden_states=torch.randn(1, 5, 24, generator=generator),
        encoder_hidden_states_mask=mask,
        timestep=torch.tensor([0.5]),
        img_shapes=[[(1, 3, 4)]],
        return_dict=False,
    )[0]


@pytest.mark.parametrize("mask", [None, [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
def test_it_computes_what_the_stock_one_does(model: QwenImageTransformer2DModel, mask: list[int] | None) -> None:
    given = None if mask is None else torch.tensor([mask])
    stock = forward(model, given)
    assert qwen_dit.fuse(model) == 2
    assert torch.allclose(forward(model, given), stock, atol=2e-6)
    if given is not None and not given.all():
        assert not torch.allclose(stock, forward(model, None), atol=1e-4)
