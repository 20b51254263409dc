"""The reference of the stages' errors is the function that is measured, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triptych.bench import synth
from triptych.bench.stages import exact_forward, forward_of, relative
from triptych.bench.synth import SIZES, Size
from triptych.config import Shape

CPU = torch.device("cpu")
SHAPE = Shape(width=64, height=32, frames=5)
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "wan-small": ("WanTransformer3DModel", HEADS | {"ffn_dim": 64, "text_dim": 4096}),
    "wan-small-i2v": (
        "WanTransformer3DModel",
        HEADS | {"ffn_dim": 64, "text_dim": 4096, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 48},
    ),
    "qwen-small": ("QwenImageTransformer2DModel", HEADS | {"axes_dims_rope": (8, 8, 8)}),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_error_of_bfloat16_is_a_rounding_of_the_float32_reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_grad_enabled(False)
    kind, config = SMALL[name]
    monkeypatch.setitem(SIZES, name, Size(pipeline="", components={"transformer": ("diffusers", kind, config)}))
    forward = forward_of(name, SHAPE, CPU)
    reference = exact_forward(name, forward, CPU)
    assert reference.dtype == torch.float32
    stock = forward(synth.build(name, "transformer", CPU, torch.bfloat16))
    assert stock.dtype == torch.bfloat16
    assert 1e-4 < relative(stock, reference) < 3e-2
    assert torch.equal(exact_forward(name, forward, CPU), reference)
