"""Branches of guidance in one forward: half of the forwards, the result of branches alone up to rounding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.guiders import SkipLayerGuidance

from tests.pipeline.harness import Inbox, finish, post
from triptych.accel import batching
from triptych.accel.branches import BranchBatching
from triptych.config import ModelConfig
from triptych.errors import ConfigError, StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline

BASE = {"prompt": "a red ball", "seed": 3, "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def stock() -> ModularRolePipeline:
    loaded = load_pipeline(ModelConfig(path="tiny", device="cpu"), (Role.ENCODER, Role.DENOISER), "cpu")
    assert isinstance(loaded, ModularRolePipeline)
    return loaded


class Joined:
    """A denoiser whose branches are joined, and the batch of each of its forwards."""

    def __init__(self) -> None:
        config = ModelConfig(path="tiny", device="cpu", batch_guidance=True)
        loaded = load_pipeline(config, (Role.DENOISER,), "cpu")
        assert isinstance(loaded, ModularRolePipeline)
        self.pipeline = loaded
        self.batches: list[int] = []
        loaded.component(Role.DENOISER, "transformer").blocks[0].register_forward_pre_hook(self._count)

    def _count(self, _module: object, args: tuple[torch.Tensor, ...]) -> None:
        self.batches.append(args[0].shape[0])


@pytest.fixture
def joined() -> Joined:
    return Joined()


def handed(stock: ModularRolePipeline, **params: Any) -> tuple[dict[str, Any], Inbox]:
    whole = BASE | params
    inbox: Inbox = {role: [] for role in ROLES}
    post(finish(stock.start(Role.ENCODER, whole, [], [])), inbox)
    return whole, inbox


def denoised(pipeline: ModularRolePipeline, params: dict[str, Any], inbox: Inbox) -> list[torch.Tensor]:
    (output,) = finish(pipeline.start(Role.DENOISER, params, inbox[Role.DENOISER], [])).outputs
    return list(output.tensors)


@pytest.mark.parametrize(("faster", "expected"), [(True, [1, 1, 2, 2, 2]), (False, [1] * 8)])
def test_branches_are_joined_where_that_is_measured_to_be_faster(
    stock: ModularRolePipeline, joined: Joined, monkeypatch: pytest.MonkeyPatch, faster: bool, expected: list[int]
) -> None:
    monkeypatch.setattr(batching, "_seconds", lambda call, count: 0.1 if faster else 0.1 * count)
    params, inbox = handed(stock, guidance_scale=5.0)
    for ours, theirs in zip(denoised(joined.pipeline, params, inbox), denoised(stock, params, inbox), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert joined.batches == expected
    assert "branches of guidance joined" in joined.pipeline.fingerprint


@pytest.mark.parametrize("steps", [4, 9])
def test_the_keys_of_joined_texts_are_computed_once(
    stock: ModularRolePipeline, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(batching, "_seconds", lambda call, count: 0.1)
    config = ModelConfig(path="tiny", device="cpu", batch_guidance=True, profile="lossless")
    pipeline = load_pipeline(config, (Role.DENOISER,), "cpu")
    computed: list[int] = []
    keys = pipeline.component(Role.DENOISER, "transformer").blocks[0].attn2.to_k
    keys.register_forward_pre_hook(lambda _module, args: computed.append(args[0].shape[0]))
    params, inbox = handed(stock, guidance_scale=5.0, num_inference_steps=steps)
    for ours, theirs in zip(denoised(pipeline, params, inbox), denoised(stock, params, inbox), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)
    assert computed == [1, 1, 2, 2]  # apart, together, and together as one text that stays


def test_a_step_without_guidance_is_as_it_was(stock: ModularRolePipeline, joined: Joined) -> None:
    params, inbox = handed(stock, guidance_scale=1.0)
    for ours, theirs in zip(denoised(joined.pipeline, params, inbox), denoised(stock, params, inbox), strict=True):
        assert torch.equal(ours, theirs)


def test_a_forward_that_fails_fails_its_request_and_no_other(
    stock: ModularRolePipeline, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_seconds", lambda call, count: 0.1)
    params, inbox = handed(stock, guidance_scale=5.0)
    run = joined.pipeline.start(Role.DENOISER, params, inbox[Role.DENOISER], [])
    run.advance()

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    hook = joined.pipeline.component(Role.DENOISER, "transformer").blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(StageError, match="out of luck"):
        run.advance()
    hook.remove()
    for ours, theirs in zip(denoised(joined.pipeline, params, inbox), denoised(stock, params, inbox), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_guider_that_changes_the_model_for_a_branch_is_left_alone() -> None:
    guider = SkipLayerGuidance(skip_layer_guidance_layers=[0])
    kind = type(guider)
    assert type(BranchBatching().guider(guider)) is kind


@pytest.mark.parametrize("keeps", [True, False])
def test_a_loop_that_cannot_be_joined_is_named_once(keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    batching, model = BranchBatching(), torch.nn.Linear(4, 4)
    batching.install(model)
    for _ in range(3):
        branches = [SimpleNamespace(noise_pred=None), SimpleNamespace(noise_pred=None)]
        batching.begin(branches)
        for branch in branches:
            predicted = model(torch.ones(1, 4))
            branch.noise_pred = predicted if keeps else -predicted
        batching.gather(branches)
    said = [] if keeps else ["batch-guidance has no effect on Linear: its loop changes what was predicted for a branch"]
    assert [message.partition(" before")[0] for message in caplog.messages] == said


def test_what_decides_about_the_same_forwards_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch-guidance and step-cache"):
        ModelConfig(path="tiny", batch_guidance=True, step_cache=0.1)
