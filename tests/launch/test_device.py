"""Where a process computes when nobody said so."""

from __future__ import annotations

import logging

import pytest
import torch

from triptych.launch.device import detect_device


@pytest.mark.parametrize(("seen", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_taken_where_torch_sees_one_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seen: bool, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    with caplog.at_level(logging.INFO):
        assert detect_device() == device
    assert f"computing on {device}" in caplog.text
