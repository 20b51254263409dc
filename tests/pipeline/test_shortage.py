"""What is held of a request whose memory ran out: nothing, also while the process has nothing else to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triptych.accel.shortage import is_out_of_memory
from triptych.config import ModelConfig
from triptych.errors import OutOfMemory
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline

from .harness import Trio

REQUEST: dict[str, Any] = {
    "prompt": "a red circle",
    "width": 64,
    "height": 64,
    "num_frames": 9,
    "num_inference_steps": 4,
    "seed": 3,
}


def loaded(**options: Any) -> tuple[ModularRolePipeline, Trio]:
    pipeline = load_pipeline(ModelConfig(path="tiny", device="cpu", **options), ROLES, "cpu")
    assert isinstance(pipeline, ModularRolePipeline)
    return pipeline, Trio.of(dict.fromkeys(ROLES, pipeline))


class Scarce:
    """Lets memory run out in one call of a layer."""

    def __init__(self, layer: torch.nn.Module, call: int) -> None:
        self.left = call
        layer.register_forward_pre_hook(self)

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_the_vae_keeps_no_frames_of_a_video_that_it_could_not_decode() -> None:
    """Symptom: after the failure the decoder held several times what the video takes, until the next one came."""
    pipeline, trio = loaded()
    inbox = trio.encoded(REQUEST)
    trio.stage(Role.DENOISER, REQUEST, inbox)
    expected = trio.stage(Role.DECODER, REQUEST, inbox).clips
    vae = pipeline.component(Role.DECODER, "vae")
    Scarce(vae.decoder.conv_out, 2)
    with pytest.raises(OutOfMemory):
        trio.stage(Role.DECODER, REQUEST, inbox)
    assert not [kept for kept in vae._feat_map if isinstance(kept, torch.Tensor)]
    (again,), (before,) = trio.stage(Role.DECODER, REQUEST, inbox).clips, expected
    assert (again.frames == before.frames).all()


def test_the_step_cache_keeps_nothing_of_a_step_that_failed() -> None:
    pipeline, trio = loaded(step_cache=0.05)
    inbox = trio.encoded(REQUEST)
    transformer = pipeline.component(Role.DENOISER, "transformer")
    run = trio.start(Role.DENOISER, REQUEST, inbox)
    run.advance()
    Scarce(transformer.blocks[1], 1)
    with pytest.raises(OutOfMemory):
        run.advance()
    clock = pipeline._clock
    assert clock.timestep is None
    assert not clock.memory.steps
    assert not clock.memory.shares


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_libraries_that_get_no_memory_are_understood(words: str) -> None:
    """Symptom: such a request failed without advice, and counted against the instance."""
    assert is_out_of_memory(RuntimeError(words))


def test_other_errors_are_none_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("out of memory"))
