"""Runs that are broken off between two steps and go on elsewhere, against runs that nobody disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.config import ModelConfig
from triptych.errors import StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import Resumable, StageRun

from .harness import Inbox, Trio, finish, latents, post

REQUESTS: dict[str, dict[str, Any]] = {
    "wan_t2v": {"prompt": "a cat", "max_sequence_length": 32, "num_frames": 5, "height": 32, "width": 32,
                "num_inference_steps": 6, "guidance_scale": 6.0, "seed": 1},
    "qwen_t2i": {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 6, "seed": 2},
}  # fmt: skip


class Place:
    """Two loadings of one model, as on two instances, and a request that was encoded for them."""

    def __init__(self, folder: Path, params: dict[str, Any]) -> None:
        self.params = params
        self.trios: list[Trio] = []
        for _ in range(2):
            pipeline = load_pipeline(ModelConfig(path=str(folder), device="cpu"), ROLES, "cpu")
            self.trios.append(Trio.of(dict.fromkeys(ROLES, pipeline)))  # type: ignore[arg-type]
        self.inbox = self.trios[0].encoded(params)
        self.undisturbed = denoised(self.start())

    def start(self, instance: int = 0) -> StageRun:
        return self.trios[instance].start(Role.DENOISER, self.params, self.inbox)

    def broken_off(self, step: int) -> tuple[bytes, list[torch.Tensor]]:
        """The checkpoint, after a trip as bytes, of a run that ends after ``step`` steps."""
        run = self.start()
        while run.step < step:
            run.advance()
        frozen = checkpoint(run)
        run.advance()  # what the next step writes must not reach the checkpoint
        run.cancel()
        return frozen

    def resumed(self, frozen: tuple[bytes, list[torch.Tensor]]) -> StageRun:
        """A run on the other instance that goes on from there."""
        run = self.start(1)
        assert isinstance(run, Resumable)
        run.restore(*frozen)
        return run


def checkpoint(run: StageRun) -> tuple[bytes, list[torch.Tensor]]:
    assert isinstance(run, Resumable)
    frozen = run.checkpoint()
    assert frozen is not None
    tree, tensors = frozen
    return tree, [
        torch.frombuffer(bytearray(raw(t)), dtype=torch.uint8).view(t.dtype).reshape(t.shape) for t in tensors
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def denoised(run: StageRun) -> torch.Tensor:
    inbox: Inbox = {role: [] for role in Role}
    post(finish(run), inbox)
    return latents(inbox)


@pytest.fixture(scope="module", params=REQUESTS)
def place(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Place:
    return Place(checkpoint(request.param), REQUESTS[request.param])


@pytest.fixture(scope="module")
def wan(checkpoint: Callable[[str], Path]) -> Place:
    return Place(checkpoint("wan_t2v"), REQUESTS["wan_t2v"])


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_resumed_run_is_bit_identical_to_an_undisturbed_one(place: Place, step: int) -> None:
    run = place.resumed(place.broken_off(step))
    assert (run.step, run.steps) == (step, place.params["num_inference_steps"])
    run.advance()
    assert run.step == step + 1
    assert torch.equal(denoised(run), place.undisturbed)


def test_a_resumed_run_computes_no_step_twice(wan: Place) -> None:
    frozen = wan.broken_off(4)
    calls: list[None] = []
    transformer = wan.trios[1].pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    hook = transformer.register_forward_hook(lambda *_: calls.append(None))
    finish(wan.resumed(frozen))
    hook.remove()
    assert len(calls) == 2 * 2  # two steps, each with and without the prompt


def test_a_run_may_be_resumed_again_and_again(place: Place) -> None:
    frozen = place.broken_off(1)
    for _ in range(2):
        run = place.resumed(frozen)
        run.advance()
        frozen = checkpoint(run)
        run.cancel()
    run = place.resumed(frozen)
    assert run.step == 3
    assert torch.equal(denoised(run), place.undisturbed)


def test_taking_checkpoints_changes_nothing(place: Place) -> None:
    run = place.start()
    result = None
    while result is None:
        result = run.advance()
        if result is None:
            checkpoint(run)
    inbox: Inbox = {role: [] for role in Role}
    post(result, inbox)
    assert torch.equal(latents(inbox), place.undisturbed)


def test_a_checkpoint_holds_what_the_steps_changed_and_not_the_prompt(wan: Place) -> None:
    _, tensors = wan.broken_off(3)
    size = wan.undisturbed.numel() * 4
    embeddings = [t for _, some in wan.inbox[Role.DENOISER] for t in some if t.ndim == 3]
    assert embeddings
    assert not any(t.shape == e.shape for t in tensors for e in embeddings)
    assert sum(t.numel() * t.element_size() for t in tensors) < 10 * size


def test_there_is_no_checkpoint_before_the_first_step_nor_after_the_end(wan: Place) -> None:
    run = wan.start()
    assert isinstance(run, Resumable)
    assert run.checkpoint() is None
    run.advance()
    assert run.checkpoint() is not None
    run.cancel()
    assert run.checkpoint() is None
    done = wan.start()
    finish(done)
    assert isinstance(done, Resumable)
    assert done.checkpoint() is None


def test_a_checkpoint_of_another_number_of_steps_is_refused_and_may_be_tried_without(wan: Place) -> None:
    frozen = wan.broken_off(2)
    run = wan.trios[1].start(Role.DENOISER, wan.params, wan.trios[0].encoded(wan.params | {"num_inference_steps": 4}))
    assert isinstance(run, Resumable)
    run.restore(*frozen)
    with pytest.raises(StageError, match="cannot resume") as caught:
        run.advance()
    assert caught.value.retryable


@pytest.mark.parametrize("tree", [b"", b"\xc0", b"\x93\xa1s\x01"])
def test_what_is_no_checkpoint_is_refused_and_may_be_tried_without(wan: Place, tree: bytes) -> None:
    run = wan.start()
    assert isinstance(run, Resumable)
    with pytest.raises(StageError, match="checkpoint") as caught:
        run.restore(tree, [])
    assert caught.value.retryable


def test_a_model_that_keeps_a_cache_between_steps_has_no_checkpoints(wan: Place) -> None:
    from diffusers import PyramidAttentionBroadcastConfig

    transformer = wan.trios[0].pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )
    transformer.enable_cache(config)
    try:
        run = wan.start()
        run.advance()
        assert isinstance(run, Resumable)
        assert run.checkpoint() is None
        run.cancel()
    finally:
        transformer.disable_cache()
