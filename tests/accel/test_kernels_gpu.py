"""The Triton kernels and the FlashAttention-3 operators against their plain references, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(77, 2, 64), (1000, 12, 128), (513, 40, 128)])
def test_rms_rope(tokens: int, heads: int, dim: int) -> None:
    from triptych.accel.kernels.rms_rope import reference, rms_rope

    x = torch.randn(2, tokens, heads * dim, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(heads * dim, device="cuda", dtype=torch.bfloat16)
    angle = torch.rand(tokens, dim // 2, device="cuda") * 6
    expected = reference(x, weight, angle.cos(), angle.sin(), heads, 1e-5)
    assert relative(rms_rope(x, weight, angle.cos(), angle.sin(), heads, 1e-5), expected) < 1e-3


def test_linear_gelu() -> None:
    from triptych.accel.gelu import linear_gelu

    x = torch.randn(1, 300, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16) / 20
    bias = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    expected = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    assert relative(linear_gelu(x, weight, bias), expected) < 5e-3


@pytest.mark.parametrize(("name", "bound"), [("flash3", 5e-3), ("flash3_fp8", 8e-2)])
def test_flash3(name: str, bound: float) -> None:
    from triptych.accel import flash3

    if not flash3.available(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU and fa3-fwd")
    q, k, v = (torch.randn(1, 2500, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = F.scaled_dot_product_attention(*(x.float().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert relative(getattr(flash3, name)(q, k, v, 128**-0.5, False), expected) < bound


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [512, 1536, 8960, 13824])
def test_rows_fp8(width: int, gelu: bool) -> None:
    from triptych.accel.kernels.rows_fp8 import reference, rows_fp8

    x = torch.randn(300, width, device="cuda", dtype=torch.bfloat16) * 3
    x[7] = 0
    (values, scales), (expected, expected_scales) = rows_fp8(x, gelu), reference(x, gelu)
    assert torch.allclose(scales, expected_scales, rtol=1e-2)
    assert relative(values.float() * scales, expected.float() * expected_scales) < 1e-2
    assert relative(values.float() * scales, F.gelu(x, approximate="tanh") if gelu else x) < 5e-2


def test_fp8_attention_over_a_text_is_exact() -> None:
    from triptych.accel import flash3

    if not flash3.available(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU and fa3-fwd")
    q = torch.randn(1, 3000, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 512, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    settings = (q, k, v, 128**-0.5, False)
    assert torch.equal(flash3.flash3_fp8(*settings), flash3.flash3(*settings))
