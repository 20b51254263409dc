"""Requests that share forwards come out as they do alone, up to rounding; one that fails does not take others along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.accel import batching
from triptych.accel.batching import Call, ForwardBatcher
from triptych.accel.merging import Merged
from triptych.config import ModelConfig, Offload
from triptych.errors import OutOfMemory, StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import StageResult

from .harness import Trio, latents, post

REQUEST: dict[str, Any] = {
    "prompt": "a red circle moving right on a blue background",
    "width": 32,
    "height": 32,
    "num_frames": 5,
    "num_inference_steps": 4,
    "seed": 3,
}
OTHERS = (
    {**REQUEST, "prompt": "a blue square growing on a white background", "seed": 4, "num_inference_steps": 6},
    {**REQUEST, "seed": 5, "guidance_scale": 1.0},
    {**REQUEST, "seed": 6, "width": 64},
)


@pytest.fixture(scope="module")
def trio() -> Trio:
    pipeline = load_pipeline(ModelConfig(path="tiny", device="cpu", batching=True, prompt_cache_bytes=0), ROLES, "cpu")
    assert isinstance(pipeline, ModularRolePipeline)
    assert pipeline.joins
    return Trio.of(dict.fromkeys(ROLES, pipeline))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls in each round; every kind is joined without being measured."""
    seen: list[int] = []
    run = ForwardBatcher.run

    def watched(self: ForwardBatcher, calls: Any) -> None:
        self.caps |= {call.key: 4 for call in calls}
        seen.append(len({call.key for call in calls}))
        run(self, calls)

    monkeypatch.setattr(ForwardBatcher, "run", watched)
    return seen


def together(trio: Trio, requests: list[dict[str, Any]], spoil: int | None = None) -> list[torch.Tensor | Exception]:
    pipeline = trio.pipelines[Role.DENOISER]
    inboxes = [trio.encoded(request) for request in requests]
    runs = {n: trio.start(Role.DENOISER, r, inboxes[n]) for n, r in enumerate(requests)}
    ended: dict[int, torch.Tensor | Exception] = {}
    while runs:
        if spoil in runs and runs[spoil].step == 2:
            runs[spoil].cancel()  # a run that is over raises when it is advanced
        order = list(runs)
        for n, result in zip(order, pipeline.advance_together([runs[n] for n in order]), strict=True):
            if isinstance(result, StageResult):
                post(result, inboxes[n])
                ended[n] = latents(inboxes[n])
            elif isinstance(result, Exception):
                ended[n] = result
            if n in ended:
                del runs[n]
    return [ended[n] for n in range(len(requests))]


def alone(trio: Trio, request: dict[str, Any]) -> torch.Tensor:
    inbox = trio.encoded(request)
    trio.stage(Role.DENOISER, request, inbox)
    return latents(inbox)


def test_each_request_comes_out_as_alone(trio: Trio, sizes: list[int]) -> None:
    requests = [REQUEST, *OTHERS]
    for request, joint in zip(requests, together(trio, requests), strict=True):
        assert isinstance(joint, torch.Tensor)
        assert torch.allclose(joint, alone(trio, request), atol=1e-4), request
    assert sizes[0] == 2  # four requests of two shapes


def test_prompts_are_encoded_together(trio: Trio, sizes: list[int]) -> None:
    pipeline = trio.pipelines[Role.ENCODER]
    requests = [{**REQUEST, "prompt": f"a red {shape} on white"} for shape in ("circle", "square")]
    runs = [trio.start(Role.ENCODER, request, {role: [] for role in ROLES}) for request in requests]
    joint = pipeline.advance_together(runs)
    assert sizes[0] == 1  # both prompts in one forward
    for request, result in zip(requests, joint, strict=True):
        assert isinstance(result, StageResult)
        run = trio.start(Role.ENCODER, request, {role: [] for role in ROLES})
        expected = run.advance()
        assert expected is not None
        for mine, other in zip(result.outputs[0].tensors, expected.outputs[0].tensors, strict=True):
            assert torch.allclose(mine.float(), other.float(), atol=1e-5)


WORDS = ("a cat", "a very large red circle in front of a blue wall, seen from far above")


@pytest.mark.parametrize("family", ["z_image", "qwen_t2i", "sd3_without_t5"])
def test_prompts_of_any_length_share_a_forward(
    checkpoint: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of models that do not pad the text, so that nearly every prompt has a length of its own."""
    model = ModelConfig(path=str(checkpoint(family)), device="cpu", batching=True, prompt_cache_bytes=0)
    pipeline = load_pipeline(model, ROLES, "cpu")
    assert isinstance(pipeline, ModularRolePipeline)
    trio = Trio.of(dict.fromkeys(ROLES, pipeline))
    asked = {"height": 32, "width": 48, "num_inference_steps": 2, "guidance_scale": 3.0, "negative_prompt": "bad"}
    requests = [{**asked, "prompt": prompt, "seed": seed} for seed, prompt in enumerate(WORDS)]
    expected = [alone(trio, request) for request in requests]
    sizes: list[int] = []
    joined = batching._joined

    def watched(calls: Sequence[Call], merged: Merged) -> list[Any]:
        sizes.append(len(calls))
        return joined(calls, merged)

    monkeypatch.setattr(batching, "_joined", watched)
    monkeypatch.setattr(batching, "_seconds", lambda calls, count: 0.1)
    for joint, one in zip(together(trio, requests), expected, strict=True):
        assert isinstance(joint, torch.Tensor)
        assert torch.allclose(joint, one, atol=1e-4)
    assert set(sizes) == {2}
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)


@pytest.mark.usefixtures("sizes")
def test_a_run_that_fails_leaves_the_others_alone(trio: Trio) -> None:
    first, second, third = together(trio, [REQUEST, OTHERS[0], REQUEST], spoil=1)
    assert isinstance(second, StageError)
    assert isinstance(first, torch.Tensor)
    assert isinstance(third, torch.Tensor)
    assert torch.allclose(first, alone(trio, REQUEST), atol=1e-4)
    assert torch.allclose(third, first, atol=1e-4)


def out_of_memory(monkeypatch: pytest.MonkeyPatch, too_large: Callable[[Sequence[Call]], bool]) -> None:
    """Let memory run out over forwards that are ``too_large``."""
    joined = batching._joined

    def scarce(calls: Sequence[Call], merged: Merged) -> list[Any]:
        if too_large(calls):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return joined(calls, merged)

    monkeypatch.setattr(batching, "_joined", scarce)


@pytest.mark.usefixtures("sizes")
def test_requests_whose_forwards_do_not_fit_together_are_computed_apart(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(trio, request) for request in (REQUEST, OTHERS[0])]
    out_of_memory(monkeypatch, lambda calls: len(calls) > 1)
    for one, joint in zip(expected, together(trio, [REQUEST, OTHERS[0]]), strict=True):
        assert isinstance(joint, torch.Tensor)
        assert torch.equal(joint, one)


def test_a_request_that_does_not_fit_even_alone_fails_with_advice_and_the_others_go_on(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide(calls: Sequence[Call]) -> bool:
        return any(isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (12,) for leaf in calls[0].leaves)

    expected = alone(trio, REQUEST)
    out_of_memory(monkeypatch, wide)
    wides = [{**REQUEST, "width": 96, "seed": seed} for seed in (6, 8)]  # of a kind that has not been measured
    first, second, third = together(trio, [wides[0], REQUEST, wides[1]])
    for error in (first, third):
        assert isinstance(error, OutOfMemory)
        assert "the denoiser ran out of memory: lower height" in error.message
    assert isinstance(second, torch.Tensor)
    assert torch.allclose(second, expected, atol=1e-4)


def test_no_more_are_measured_than_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with --max-running-requests 2 the first step of a shape took fifteen forwards more than it had to."""
    config = ModelConfig(path="tiny", device="cpu", batching=True)
    pipeline = load_pipeline(config, ROLES, "cpu", at_once=2)
    pair = Trio.of(dict.fromkeys(ROLES, pipeline))
    sizes: list[int] = []
    joined = batching._joined

    def watched(calls: Sequence[Call], merged: Merged) -> list[Any]:
        sizes.append(len(calls))
        return joined(calls, merged)

    monkeypatch.setattr(batching, "_joined", watched)
    monkeypatch.setattr(batching, "_GAIN", 1e9)
    together(pair, [REQUEST, OTHERS[0]])
    assert max(sizes) == 2


@pytest.mark.parametrize("option", ["batching", "batch_guidance"])
@pytest.mark.parametrize(("offload", "tried"), [({}, {1}), ({Role.DENOISER: "block"}, {1, 2})])
def test_long_forwards_are_tried_together_where_it_may_be_the_weights_that_take_long(
    monkeypatch: pytest.MonkeyPatch, option: str, offload: dict[Role, Offload], tried: set[int]
) -> None:
    counts: list[int] = []

    def seconds(calls: Sequence[Call], count: int) -> float:
        counts.append(count)
        return 1.0 * count

    monkeypatch.setattr(batching, "_seconds", seconds)
    model = ModelConfig(path="tiny", device="cpu", offload=offload, **{option: True})
    pipeline = load_pipeline(model, ROLES, "cpu")
    trio = Trio.of(dict.fromkeys(ROLES, pipeline))
    if option == "batching":
        together(trio, [REQUEST, {**REQUEST, "seed": 8}])
    else:
        trio.generate(REQUEST)
    assert set(counts) == tried
