"""Weights are read ahead where there is room for them, and loading them makes no second copy in memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from diffusers import WanTransformer3DModel

from triptych.pipeline.readahead import read_ahead
from triptych.pipeline.weights import load_component


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose transformer has about 64 MB of weights."""
    folder = tmp_path_factory.mktemp("model")
    model = WanTransformer3DModel(num_attention_heads=4, attention_head_dim=64, ffn_dim=2048, num_layers=8, text_dim=64)
    model.save_pretrained(folder / "transformer")
    return folder


def private_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_weights_in_their_own_dtype_lie_in_the_mapped_file_alone(folder: Path) -> None:
    before = private_bytes()
    entry = ("diffusers", "WanTransformer3DModel")
    module = load_component(folder, "transformer", entry, None, torch.float32, torch.device("cpu"))
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    total = sum(float(parameter.abs().sum()) for parameter in module.parameters())  # every page has been read now
    assert nbytes > 40_000_000
    assert total > 0
    assert private_bytes() - before < 0.3 * nbytes


def test_reading_ahead_asks_for_what_is_there_and_waits_for_nothing(folder: Path) -> None:
    thread = read_ahead(folder, ["transformer", "vae"])
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert read_ahead(folder, ["vae"]) is None


def test_weights_that_memory_has_no_room_for_are_not_read_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    assert read_ahead(folder, ["transformer"]) is None
