"""Step caching on the trained model: steps are saved, the error is small, requests and checkpoints keep apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.accel.step_cache import FIELD, StepMemory, install
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.pipeline.checkpoint import lighter
from triptych.pipeline.codec import decode_state
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import Resumable

from .harness import Inbox, Trio, finish, latents, post

REQUEST: dict[str, Any] = {
    "prompt": "a red circle moving right on a blue background",
    "width": 64,
    "height": 64,
    "num_frames": 5,
    "num_inference_steps": 20,
    "seed": 3,
}
OTHER = {**REQUEST, "prompt": "a blue square growing on a white background", "seed": 4, "num_inference_steps": 11}
THRESHOLD = 0.08


def loaded(step_cache: float, tally: Tally) -> Trio:
    config = ModelConfig(path="tiny", device="cpu", step_cache=step_cache)
    pipeline = load_pipeline(config, ROLES, "cpu", tally)
    assert isinstance(pipeline, ModularRolePipeline)
    return Trio.of(dict.fromkeys(ROLES, pipeline))


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.fixture(scope="module")
def cached(tally: Tally) -> Trio:
    return loaded(THRESHOLD, tally)


def denoised(trio: Trio, request: dict[str, Any]) -> torch.Tensor:
    inbox = trio.encoded(request)
    trio.stage(Role.DENOISER, request, inbox)
    return latents(inbox)


def test_steps_are_saved_at_a_small_error(cached: Trio, tally: Tally) -> None:
    exact = denoised(loaded(0.0, Tally()), REQUEST)
    before = tally.steps_skipped
    close = denoised(cached, REQUEST)
    skipped = tally.steps_skipped - before
    error = float((close - exact).norm() / exact.norm())
    forwards = 2 * REQUEST["num_inference_steps"]
    print(f"threshold {THRESHOLD}: {skipped} of {forwards} forwards cut short, relative error {error:.3f}")
    assert skipped >= 4
    assert 0 < error < 0.1


def test_interleaved_requests_give_what_they_give_alone(cached: Trio) -> None:
    alone = [denoised(cached, request) for request in (REQUEST, OTHER)]
    inboxes = [cached.encoded(request) for request in (REQUEST, OTHER)]
    runs = [cached.start(Role.DENOISER, r, inbox) for r, inbox in zip((REQUEST, OTHER), inboxes, strict=True)]
    waiting = list(zip(runs, inboxes, strict=True))
    while waiting:
        for run, inbox in list(waiting):
            if (result := run.advance()) is not None:
                post(result, inbox)
                waiting.remove((run, inbox))
    for inbox, expected in zip(inboxes, alone, strict=True):
        assert torch.equal(latents(inbox), expected)


@pytest.mark.parametrize("after", [2, 7])
def test_a_checkpoint_carries_what_later_steps_reuse(cached: Trio, after: int) -> None:
    whole = denoised(cached, REQUEST)
    inbox: Inbox = cached.encoded(REQUEST)
    run = cached.start(Role.DENOISER, REQUEST, inbox)
    for _ in range(after):
        assert run.advance() is None
    assert isinstance(run, Resumable)
    frozen = run.checkpoint()
    assert frozen is not None
    run.cancel()
    resumed = cached.start(Role.DENOISER, REQUEST, inbox)
    assert isinstance(resumed, Resumable)
    resumed.restore(*frozen)
    post(finish(resumed), inbox)
    assert torch.equal(latents(inbox), whole)


def test_a_checkpoint_without_what_was_kept_is_small_and_goes_on(cached: Trio) -> None:
    whole = denoised(cached, REQUEST)
    inbox: Inbox = cached.encoded(REQUEST)
    run = cached.start(Role.DENOISER, REQUEST, inbox)
    for _ in range(7):
        assert run.advance() is None
    assert isinstance(run, Resumable)
    frozen = run.checkpoint()
    assert frozen is not None
    run.cancel()
    light = lighter(frozen)
    assert light is not None
    assert sum(t.nbytes for t in light[1]) < sum(t.nbytes for t in frozen[1]) / 2
    assert lighter(light) is None
    resumed = cached.start(Role.DENOISER, REQUEST, inbox)
    assert isinstance(resumed, Resumable)
    resumed.restore(*light)
    post(finish(resumed), inbox)
    assert (latents(inbox) - whole).norm() < 0.1 * whole.norm()


def test_of_two_transformers_only_the_one_whose_turn_it_is_keeps_something(checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig(path=str(checkpoint("wan22_t2v")), device="cpu", step_cache=THRESHOLD)
    pipeline: Any = load_pipeline(config, ROLES, "cpu", Tally())
    trio = Trio.of(dict.fromkeys(ROLES, pipeline))
    run = trio.start(Role.DENOISER, REQUEST, trio.encoded(REQUEST))
    assert isinstance(run, Resumable)
    kept: list[set[str]] = []
    while run.advance() is None:  # pyright: ignore[reportAttributeAccessIssue]  # it is a run too
        frozen = run.checkpoint()
        assert frozen is not None
        values, _ = decode_state(*frozen, torch.device("cpu"))
        kept.append({key.partition(".")[0] for key in values["replaced"]["state"][FIELD]})
    assert kept[0] == {"transformer"}
    assert kept[-1] == {"transformer_2"}
    assert all(len(models) == 1 for models in kept)


def test_the_fingerprint_tells_a_caching_denoiser_from_an_exact_one(cached: Trio) -> None:
    fingerprint = cached.pipelines[Role.DENOISER].fingerprint
    assert "step cache threshold 0.08" in fingerprint
    assert fingerprint != loaded(0.0, Tally()).pipelines[Role.DENOISER].fingerprint


def test_a_threshold_that_is_no_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step-cache=1\.5"):
        ModelConfig(path="tiny", step_cache=1.5)


def test_of_a_model_with_two_streams_both_are_kept(checkpoint: Callable[[str], Path]) -> None:
    """Qwen-Image's blocks give back the text and the picture, each of its own length."""
    request = {"prompt": "a cat", "height": 32, "width": 48, "num_inference_steps": 10, "seed": 3}
    made: list[torch.Tensor] = []
    tally = Tally()
    for threshold in (0.0, 0.4):
        config = ModelConfig(path=str(checkpoint("qwen_t2i")), device="cpu", step_cache=threshold)
        pipeline: Any = load_pipeline(config, ROLES, "cpu", tally)
        made.append(denoised(Trio.of(dict.fromkeys(ROLES, pipeline)), request))
    assert tally.steps_skipped > 0
    error = float((made[1] - made[0]).norm() / made[0].norm())
    assert 0 < error < 0.02


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("flux", "FluxTransformer2DModel has 0 lists of blocks"),
        ("ltx2", "LTX2VideoTransformer3DModel take other streams"),
        ("z_image", "ZImageTransformer2DModel take other streams"),
        ("sd3_without_t5", "SD3Transformer2DModel has 0 lists of blocks"),
    ],
)
def test_models_whose_blocks_it_cannot_pass_over_are_refused(
    checkpoint: Callable[[str], Path], family: str, reason: str
) -> None:
    config = ModelConfig(path=str(checkpoint(family)), device="cpu", step_cache=0.1)
    with pytest.raises(ConfigError, match=reason):
        load_pipeline(config, (Role.DENOISER,), "cpu")


@pytest.mark.parametrize("family", ["cogvideox_t2v", "sana", "svd"])
def test_a_pipeline_whose_loop_is_its_own_is_refused(classic_checkpoint: Callable[[str], Path], family: str) -> None:
    config = ModelConfig(path=str(classic_checkpoint(family)), device="cpu", step_cache=0.1)
    with pytest.raises(ConfigError, match=r"step-cache=0\.1.*replaying its own loop"):
        load_pipeline(config, (Role.DENOISER,), "cpu")


class Shallow(torch.nn.Module):
    """A model of three equal blocks, which change less and less."""

    _repeated_blocks = ("Halving",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Halving() for _ in range(3))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


class Halving(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states / 2


@pytest.mark.parametrize(("computing", "skipped"), [(("a",), 5), (("a", "b"), 10), (("a", "b", "a"), 15)])
def test_models_that_compute_in_the_same_step_each_keep_their_own(computing: tuple[str, ...], skipped: int) -> None:
    """Symptom: of two models computed by turns, each dropped what the other had kept, and no step was ever skipped."""
    memory, tally = StepMemory(), Tally()
    models = {name: Shallow() for name in ("a", "b")}
    for name, model in models.items():
        install(model, name, THRESHOLD, memory, tally)
    state = SimpleNamespace()
    setattr(state, FIELD, {})
    for _ in range(6):
        memory.enter(state)
        for name in computing:
            models[name](torch.ones(2, 3))
    assert tally.steps_skipped == skipped
    memory.enter(state)
    assert {key.partition(".")[0] for key in getattr(state, FIELD)} == set(computing)


def test_a_model_whose_turn_is_over_keeps_nothing() -> None:
    memory = StepMemory()
    models = {name: Shallow() for name in ("a", "b")}
    for name, model in models.items():
        install(model, name, THRESHOLD, memory, Tally())
    state = SimpleNamespace()
    setattr(state, FIELD, {})
    for name in "aabb":
        memory.enter(state)
        models[name](torch.ones(2, 3))
        assert {key.partition(".")[0] for key in getattr(state, FIELD)} == {name}
