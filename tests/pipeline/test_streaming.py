"""Weights that come to a device by staging are those that Diffusers and Transformers load: every byte, dtype and tie.

The device is host memory, behind a lane that copies as late as it may; `test_streaming_gpu.py` does the same on a GPU.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from triptych.errors import ModelError
from triptych.pipeline import weights
from triptych.pipeline.source import index_components, read_index
from triptych.pipeline.standin import component_class
from triptych.pipeline.weights import load_component

from .lanes import LateLane
from .test_readahead import private_bytes

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")
FAMILIES = ("wan_t2v", "wan_i2v", "qwen_t2i", "sd3", "ltx2", "hunyuan_video15", "flux2_klein")


def models(folder: Path) -> dict[str, tuple[str, str]]:
    """The components that have weights."""
    found = index_components(read_index(folder))
    return {name: kind for name, kind in found.items() if issubclass(component_class(name, *kind), torch.nn.Module)}


def load(folder: Path, name: str, dtype: torch.dtype, override: str | None = None) -> Any:
    return load_component(folder, name, models(folder)[name], override, dtype, CPU)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LateLane]:
    """From then on weights are staged, with buffers of 16 KiB."""

    def begin(fails_at: int | None = None) -> LateLane:
        lane = LateLane(fails_at)
        monkeypatch.setattr(weights, "lane_to", lambda device: lane)
        monkeypatch.setattr(weights, "PIECE", 1 << 14)
        return lane

    return begin


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    assert got.training == expected.training
    for kind in ("named_parameters", "named_buffers"):
        mine = dict(getattr(got, kind)(remove_duplicate=False))
        theirs = dict(getattr(expected, kind)(remove_duplicate=False))
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (mine[name].dtype, mine[name].stride()) == (tensor.dtype, tensor.stride()), name
            assert mine[name].requires_grad == tensor.requires_grad
            assert torch.equal(mine[name], tensor), name
        assert len({id(tensor) for tensor in mine.values()}) == len({id(tensor) for tensor in theirs.values()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_the_same_as_their_library_loads_them(
    checkpoint: Checkpoint, staged: Callable[..., LateLane], family: str, dtype: torch.dtype
) -> None:
    """Among them: layers kept in float32, tied embeddings, names of older releases, and tensors that are joined."""
    folder = checkpoint(family)
    expected = {name: load(folder, name, dtype) for name in models(folder)}
    lane = staged()
    for name, module in expected.items():
        before = lane.sent_bytes
        assert_same(load(folder, name, dtype), module)
        assert lane.sent_bytes > before, f"{name} was not staged"
    assert not lane.locked


@pytest.mark.parametrize("kind", ["transformer", "text_encoder"])
def test_models_in_several_files_are_the_same(
    checkpoint: Checkpoint, tmp_path: Path, staged: Callable[..., LateLane], kind: str
) -> None:
    folder = checkpoint("wan_t2v")
    load(folder, kind, torch.float32).save_pretrained(tmp_path / kind, max_shard_size="40KB")
    assert len(list((tmp_path / kind).glob("*.safetensors"))) > 1
    expected = load(folder, kind, torch.bfloat16)
    lane = staged()
    assert_same(load(folder, kind, torch.bfloat16, str(tmp_path)), expected)
    assert lane.sent


def test_a_file_in_the_components_own_layout_is_staged_too(
    checkpoint: Checkpoint, staged: Callable[..., LateLane]
) -> None:
    folder = checkpoint("wan_t2v")
    (file,) = (folder / "transformer").glob("*.safetensors")
    expected = load(folder, "transformer", torch.float32)
    lane = staged()
    assert_same(load(folder, "transformer", torch.float32, str(file)), expected)
    assert lane.sent


@pytest.mark.parametrize("kind", ["transformer", "text_encoder"])
@pytest.mark.parametrize("way", ["staged", "mapped"])
def test_a_file_cut_short_is_an_error_that_names_the_component(
    checkpoint: Checkpoint, tmp_path: Path, staged: Callable[..., LateLane], kind: str, way: str
) -> None:
    folder = checkpoint("wan_t2v")
    load(folder, kind, torch.float32).save_pretrained(tmp_path / kind)
    (file,) = (tmp_path / kind).glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    if way == "staged":
        staged()
    with pytest.raises(ModelError, match=f"component '{kind}' cannot be loaded from"):
        load(folder, kind, torch.float32, str(tmp_path))


@pytest.mark.parametrize("kind", ["transformer", "text_encoder"])
def test_a_copy_that_fails_is_an_error_that_names_the_component(
    checkpoint: Checkpoint, staged: Callable[..., LateLane], kind: str
) -> None:
    lane = staged(fails_at=5)
    with pytest.raises(ModelError, match=f"component '{kind}' cannot be loaded from .*: the bus is gone"):
        load(checkpoint("wan_t2v"), kind, torch.float32)
    assert not lane.locked
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_a_cast_keeps_no_second_copy_in_host_memory(tmp_path: Path, staged: Callable[..., LateLane]) -> None:
    """Files in float32 for a role in bfloat16; the device is host memory here, so it holds the model once."""
    model = WanTransformer3DModel(num_attention_heads=4, attention_head_dim=64, ffn_dim=2048, num_layers=8, text_dim=64)
    model.save_pretrained(tmp_path / "transformer")
    del model
    staged()
    entry = ("diffusers", "WanTransformer3DModel")
    load_component(tmp_path, "transformer", entry, None, torch.bfloat16, CPU)  # imports what it needs
    gc.collect()
    before = private_bytes()
    module = load_component(tmp_path, "transformer", entry, None, torch.bfloat16, CPU)
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    assert nbytes > 20_000_000
    assert private_bytes() - before < 1.5 * nbytes
