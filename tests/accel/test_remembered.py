"""What a model remembered of a size is there for as long as its recording may read it; the GPU is made up."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from triptych.accel import cuda_graphs
from triptych.accel.batching import call_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that records and replays nothing, and is faster for it."""
    torch.set_grad_enabled(False)
    for name in ("synchronize", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(cuda_graphs, "_waits", lambda run: run() is None)
    seconds = iter((1.0, 0.1))
    monkeypatch.setattr(cuda_graphs, "_seconds", lambda _: next(seconds))


def recorded(model: nn.Module, *args: Any, **kwargs: Any) -> object:
    call = call_of(model.forward, args, kwargs)
    recording = cuda_graphs._recorded(model, model.forward, call)  # pyright: ignore[reportPrivateUsage]
    assert recording is not None
    return recording


def is_there(tensor: weakref.ref[Tensor]) -> bool:
    gc.collect()
    return tensor() is not None


def test_qwen_images_frequencies_outlast_other_sizes_as_long_as_the_recording_does() -> None:
    """Symptom: after pictures of 128 other sizes, a recorded one read memory that was another tensor's."""
    model = QwenImageTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
    )
    latents, text = torch.randn(1, 16, model.config.in_channels), torch.randn(1, 3, 24)
    recording = recorded(
        model, latents, text, timestep=torch.ones(1), img_shapes=[[(1, 4, 4)]], encoder_hidden_states_mask=None
    )
    frequencies: Any = model.pos_embed._compute_video_freqs  # pyright: ignore[reportPrivateUsage]
    read, other = (weakref.ref(frequencies(1, *size, 0, CPU)) for size in ((4, 4), (5, 5)))
    for width in range(200):
        model.pos_embed([[(1, 4, 6 + width)]], CPU, 3)
    assert is_there(read)
    assert not is_there(other), "the cache holds more sizes than this test asks for"
    del recording
    assert not is_there(read)


class Remembering(nn.Module):
    """Keeps the table of the size that it last had, as some rotary embeddings do."""

    table: tuple[int, Tensor] = (0, torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.table[0] != len(x):
            self.table = len(x), torch.arange(len(x))
        return x + self.table[1]


def test_what_a_module_replaces_is_held_by_the_recording() -> None:
    model = Remembering()
    recording = recorded(model, torch.ones(3))
    read = weakref.ref(model.table[1])
    model(torch.ones(4))
    assert is_there(read)
    del recording
    assert not is_there(read)


@lru_cache(maxsize=2)
def table(length: int) -> dict[str, Tensor]:
    return {"table": torch.arange(length)}


class Calling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + table(len(x))["table"]


def test_what_a_function_of_any_module_lets_go_is_held_by_the_recordings_that_read_it_alone() -> None:
    unread = weakref.ref(table(2)["table"])
    recording = recorded(Calling(), torch.ones(3))
    read = weakref.ref(table(3)["table"])
    assert not is_there(unread)
    for length in range(4, 9):
        table(length)
    assert is_there(read)
    del recording
    assert not is_there(read)
