"""What only a GPU shows of recordings: one that fails leaves nothing behind, and what waits is not even tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triptych.accel import cuda_graphs
from triptych.accel.batching import call_of

from .impatient import impatient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Deep(nn.Module):
    """So many small kernels that the host holds the GPU up."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(300):
            x = x * 1.01
        return x


class Waits(Deep):
    """The same, and it waits for the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() else x


@pytest.mark.parametrize("tried", [False, True])
def test_a_forward_that_waits_leaves_everything_as_it_was(tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_grad_enabled(False)
    good: Any = Deep()
    graphs = impatient(good)
    x = torch.ones(8, device="cuda")
    expected = Deep()(x)
    for _ in range(4):
        assert torch.equal(good(x), expected)
    assert graphs.recordings == 1
    if tried:
        monkeypatch.setattr(cuda_graphs, "_waits", lambda run: False)
    waits = Waits()
    recorded: Any = cuda_graphs._recorded(waits, waits.forward, call_of(waits.forward, (x,), {}))  # pyright: ignore[reportPrivateUsage]
    assert recorded is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    torch.manual_seed(3)
    drawn = torch.randn(4, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), drawn)
    assert torch.equal(good(x), expected)
    again: Any = Deep()
    more = impatient(again)
    for _ in range(4):
        assert torch.equal(again(x[:4]), expected[:4])
    assert more.recordings == 1
