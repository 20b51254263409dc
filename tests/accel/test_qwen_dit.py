"""Qwen-Image's transformer computes the same with a rotation in real numbers and without a mask that hides none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    qwen_dit.leave_out_masks(model)
    assert torch.allclose(forward(model, given), stock, atol=2e-6)
    if given is not None and not given.all():
        assert not torch.allclose(stock, forward(model, None), atol=1e-4)


def test_ranks_that_share_the_tokens_still_find_the_frequencies(model: QwenImageTransformer2DModel) -> None:
    plan: Any = model._cp_plan
    qwen_dit.fuse(model)
    for number, freqs in enumerate(model.pos_embed([[(1, 3, 4)]], max_txt_seq_len=5, device=torch.device("cpu"))):
        wish = plan["pos_embed"][number]
        assert freqs.dim() == wish.expected_dims
        assert len(freqs) == (12, 5)[number], "tokens stand in the dimension that is split"
        assert wish.split_dim == 0


class Looks(TorchFunctionMode):
    """Counts how often somebody waits for the device to know a tensor's number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (Tensor.__bool__, Tensor.item, Tensor.tolist, Tensor.cpu)
        return func(*args, **(kwargs or {}))


def test_steps_after_the_first_do_not_wait_to_see_the_mask(model: QwenImageTransformer2DModel) -> None:
    qwen_dit.fuse(model)
    qwen_dit.leave_out_masks(model)
    mask = torch.ones(1, 5, dtype=torch.long)
    with Looks() as first:
        forward(model, mask)
    with Looks() as later:
        for _ in range(3):
            forward(model, mask)
    assert first.count - later.count // 3 == 1
    with Looks() as maskless:
        for _ in range(3):
            forward(model, None)
    assert later.count == maskless.count


def test_a_mask_that_was_written_to_is_another_mask(model: QwenImageTransformer2DModel) -> None:
    qwen_dit.fuse(model)
    qwen_dit.leave_out_masks(model)
    mask = torch.ones(1, 5, dtype=torch.long)
    whole = forward(model, mask)
    mask[0, 3:] = 0
    assert not torch.allclose(forward(model, mask), whole, atol=1e-4)


def test_masks_are_forgotten_with_their_requests() -> None:
    masks = qwen_dit.Masks()
    mask, other = torch.ones(1, 5), torch.tensor([[1.0, 0.0]])
    assert not masks.hides(mask)
    assert masks.hides(other)
    assert len(masks) == 2
    del mask, other
    assert len(masks) == 0
