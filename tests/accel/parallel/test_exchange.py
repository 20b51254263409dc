"""What is put around Diffusers' attention backends."""

from __future__ import annotations

import pytest
import torch
from diffusers.models import attention_dispatch as dispatch

from tests.pipeline.checkpoints import wan_transformer
from triptych.accel import attention
from triptych.accel.parallel.exchange import install


def test_every_backend_that_can_be_asked_for_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with tokens shared, FlashAttention-2 failed at every forward: "multiple values for argument"."""
    registry = dispatch._AttentionBackendRegistry
    for kept in ("_backends", "_constraints", "_supported_arg_names"):
        monkeypatch.setattr(registry, kept, dict(getattr(registry, kept)))
    model = wan_transformer()
    call = {
        "hidden_states": torch.randn(1, 16, 1, 4, 4),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "return_dict": False,
    }
    with torch.no_grad():
        (expected,) = model(**call)
        for backend in ("native", "flash2", "flash3"):  # the last one leaves what is not bfloat16 to the first
            attention.use_backend(model, backend)
            install()
            (made,) = model(**call)
            torch.testing.assert_close(made, expected)
