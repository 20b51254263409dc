"""On a GPU: weights through page-locked memory are those that the libraries load, and none of it stays behind."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from triptych.pipeline import weights
from triptych.pipeline.staging import PIECE, PIECES
from triptych.pipeline.weights import load_component

from .test_readahead import private_bytes
from .test_streaming import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CUDA = torch.device("cuda", 0)
ENTRIES = {"transformer": ("diffusers", "WanTransformer3DModel"), "text_encoder": ("transformers", "UMT5EncoderModel")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models in float32, of some 600 MB each, the first in several files."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    with CUDA:
        transformer = WanTransformer3DModel(
            num_attention_heads=8, attention_head_dim=128, ffn_dim=4096, num_layers=10, text_dim=64
        )
        encoder = UMT5EncoderModel(
            UMT5Config(vocab_size=60_000, d_model=1024, d_kv=64, d_ff=4096, num_layers=6, num_heads=16)
        )
    transformer.save_pretrained(folder / "transformer", max_shard_size="250MB")
    encoder.save_pretrained(folder / "text_encoder")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ENTRIES)
def test_staged_weights_are_those_that_the_library_loads(
    folder: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "triptych.pipeline.weights"):
        got = load_component(folder, name, ENTRIES[name], None, dtype, CUDA)
        monkeypatch.setattr(weights, "lane_to", lambda device: None)
        expected = load_component(folder, name, ENTRIES[name], None, dtype, CUDA)
    assert "through page-locked memory" in caplog.messages[0]
    assert "mapped" in caplog.messages[1]
    assert {parameter.device for parameter in got.parameters()} == {CUDA}
    assert_same(got, expected)


@pytest.mark.parametrize("name", ENTRIES)
def test_host_memory_is_given_back(folder: Path, name: str) -> None:
    load_component(folder, name, ENTRIES[name], None, torch.bfloat16, CUDA)  # what CUDA and the libraries need once
    gc.collect()
    before = private_bytes()
    module = load_component(folder, name, ENTRIES[name], None, torch.bfloat16, CUDA)
    assert sum(parameter.nbytes for parameter in module.parameters()) > 2 * PIECE * PIECES
    assert private_bytes() - before < PIECE * PIECES
