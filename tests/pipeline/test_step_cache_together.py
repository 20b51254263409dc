"""Step caching in forwards that requests share: each keeps its own, and none is passed over that one of them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from triptych.accel import batching
from triptych.accel.batching import Call, ForwardBatcher
from triptych.accel.merging import Merged
from triptych.accel.step_cache import FIELD, StepMemory, install
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.errors import StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.codec import decode_state
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import Resumable, StageResult

from .harness import Trio, latents, post
from .test_step_cache import OTHER, REQUEST, THRESHOLD, Shallow
from .test_together import alone, together

UNGUIDED = {**REQUEST, "guidance_scale": 1.0, "seed": 12}
Pair = tuple[Trio, Tally]


def loaded(path: str | Path = "tiny", *, step_cache: float = THRESHOLD, joins: bool = True) -> Pair:
    tally = Tally()
    config = ModelConfig(path=str(path), device="cpu", step_cache=step_cache, batching=joins, prompt_cache_bytes=0)
    pipeline = load_pipeline(config, ROLES, "cpu", tally)
    assert isinstance(pipeline, ModularRolePipeline)
    return Trio.of(dict.fromkeys(ROLES, pipeline)), tally


@pytest.fixture(scope="module")
def cached() -> Pair:
    return loaded()


@pytest.fixture(scope="module")
def exact() -> Trio:
    return loaded(step_cache=0.0, joins=False)[0]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests in each forward; every kind is joined without being measured."""
    seen: list[int] = []
    joined = batching._joined

    def watched(calls: Sequence[Call], merged: Merged) -> list[Any]:
        seen.append(len(calls))
        return joined(calls, merged)

    monkeypatch.setattr(batching, "_joined", watched)
    monkeypatch.setattr(ForwardBatcher, "_cap", lambda batcher, calls: 4)
    return seen


def results(trio: Trio, requests: list[dict[str, Any]], spoil: int | None = None) -> list[Tensor]:
    """What each gives together with the others, but for the one that breaks off."""
    ended = together(trio, requests, spoil)
    if spoil is not None:
        assert isinstance(ended.pop(spoil), StageError)
    return [one for one in ended if isinstance(one, Tensor)]


def counted(tally: Tally, compute: Callable[[], Any]) -> tuple[Any, int]:
    before = tally.steps_skipped
    return compute(), tally.steps_skipped - before


def error(made: Tensor, expected: Tensor) -> float:
    return float((made - expected).norm() / expected.norm())


def kept(run: Any) -> dict[str, Tensor]:
    """What step caching has kept of a run that stands between two steps."""
    assert isinstance(run, Resumable)
    frozen = run.checkpoint()
    assert frozen is not None
    values, _ = decode_state(*frozen, torch.device("cpu"))
    return values["replaced"]["state"][FIELD]


def test_equal_requests_give_what_one_gives_alone_and_skip_as_much(cached: Pair, sizes: list[int]) -> None:
    trio, tally = cached
    expected, skipped = counted(tally, lambda: alone(trio, REQUEST))
    assert skipped >= 4
    sizes.clear()
    both, skipped_by_both = counted(tally, lambda: results(trio, [REQUEST, REQUEST]))
    assert skipped_by_both == 2 * skipped
    assert sizes.count(2) == 2 * REQUEST["num_inference_steps"]
    for made in both:
        assert torch.allclose(made, expected, atol=1e-4)


def test_different_requests_each_stay_near_what_they_are_without_a_cache(
    cached: Pair, exact: Trio, sizes: list[int]
) -> None:
    """One has so few steps that it skips none, and leaves the other alone; one has no guidance, and a forward a step
    less."""
    trio, tally = cached
    for requests in ([REQUEST, OTHER], [REQUEST, UNGUIDED]):
        sizes.clear()
        made, skipped = counted(tally, lambda requests=requests: results(trio, requests))
        assert skipped > 0
        assert 2 in sizes
        errors = [error(one, alone(exact, request)) for one, request in zip(made, requests, strict=True)]
        assert max(errors) < 0.1, errors
        assert OTHER not in requests or errors[1] < 1e-4


@pytest.mark.usefixtures("sizes")
def test_the_branches_of_each_request_keep_their_own(cached: Pair) -> None:
    """Every forward of the first step is computed, so that what is kept then is what one alone keeps."""
    trio, _ = cached
    requests = [REQUEST, UNGUIDED, OTHER]
    joint = [trio.start(Role.DENOISER, request, trio.encoded(request)) for request in requests]
    trio.pipelines[Role.DENOISER].advance_together(joint)
    for request, run in zip(requests, joint, strict=True):
        single = trio.start(Role.DENOISER, request, trio.encoded(request))
        single.advance()
        mine, expected = kept(run), kept(single)
        assert mine.keys() == expected.keys()
        assert len(mine) == (2 if request is UNGUIDED else 4)
        for name, value in expected.items():
            assert torch.allclose(mine[name], value, atol=1e-4), name
        single.cancel()
    first = kept(joint[0])
    assert not torch.allclose(first["transformer.0.first"], first["transformer.1.first"], atol=1e-4)
    for run in joint:
        run.cancel()


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("after", [2, 7])
def test_one_of_two_goes_on_elsewhere_from_a_checkpoint(cached: Pair, after: int) -> None:
    trio, tally = cached
    other_trio, other_tally = loaded()
    expected, skipped = counted(tally, lambda: alone(trio, REQUEST))
    inbox = trio.encoded(REQUEST)
    runs = [trio.start(Role.DENOISER, REQUEST, inbox), trio.start(Role.DENOISER, REQUEST, inbox)]

    def begin() -> None:
        for _ in range(after):
            assert trio.pipelines[Role.DENOISER].advance_together(runs) == [None, None]

    _, begun = counted(tally, begin)
    moving = runs[0]
    assert isinstance(moving, Resumable)
    frozen = moving.checkpoint()
    assert frozen is not None
    for run in runs:
        run.cancel()
    runs = [other_trio.start(Role.DENOISER, REQUEST, inbox) for _ in range(2)]
    for run in runs:
        assert isinstance(run, Resumable)
        run.restore(*frozen)
    ended: list[Any] = [None]
    while ended[0] is None:
        ended = other_trio.pipelines[Role.DENOISER].advance_together(runs)
    assert begun + other_tally.steps_skipped == 2 * skipped
    for result in ended:
        assert isinstance(result, StageResult)
        inbox[Role.DECODER].clear()
        post(result, inbox)
        assert torch.allclose(latents(inbox), expected, atol=1e-4)


@pytest.mark.usefixtures("sizes")
def test_one_that_breaks_off_leaves_the_others_as_they_are_alone(cached: Pair) -> None:
    trio, _ = cached
    expected = alone(trio, REQUEST)
    for made in results(trio, [REQUEST, OTHER, REQUEST], spoil=1):
        assert error(made, expected) < 0.1
    for made in results(trio, [REQUEST, REQUEST, REQUEST], spoil=1):
        assert torch.allclose(made, expected, atol=1e-4)
    pipeline: Any = trio.pipelines[Role.DENOISER]
    assert not pipeline._clock.memory.steps


def test_a_threshold_that_no_step_stays_below_changes_nothing(sizes: list[int]) -> None:
    (plain, _), (never, tally) = loaded(step_cache=0.0), loaded(step_cache=1e-9)
    requests = [REQUEST, OTHER]
    for made, expected in zip(results(never, requests), results(plain, requests), strict=True):
        assert torch.equal(made, expected)
    assert tally.steps_skipped == 0
    assert 2 in sizes


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("layer", ["blocks.1.block", "proj_out"])
def test_a_shared_forward_that_fails_is_computed_apart_as_the_same_forward_of_its_step(layer: str) -> None:
    """Be it within what may be passed over, or when all has been kept."""
    trio, tally = loaded()
    expected, skipped = counted(tally, lambda: alone(trio, REQUEST))
    model: Any = trio.pipelines[Role.DENOISER]
    transformer: torch.nn.Module = model.component(Role.DENOISER, "transformer")

    def refused(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (args[0] if args else kwargs["hidden_states"]).shape[0] > 1:
            raise ValueError("one at a time")

    transformer.get_submodule(layer).register_forward_pre_hook(refused, with_kwargs=True)
    inboxes = [trio.encoded(REQUEST) for _ in range(2)]
    runs = [trio.start(Role.DENOISER, REQUEST, inbox) for inbox in inboxes]
    ended: list[Any] = [None]
    while ended[0] is None:
        for run in runs:
            assert {key[:13] for key in (kept(run) if run.step else {})} <= {"transformer.0", "transformer.1"}
        ended = model.advance_together(runs)
    for result, inbox in zip(ended, inboxes, strict=True):
        post(result, inbox)
        assert torch.allclose(latents(inbox), expected, atol=1e-4)
    assert tally.steps_skipped > skipped


@pytest.mark.parametrize("profiling", [False, True])
def test_forwards_computed_to_be_measured_are_none_of_a_request(
    cached: Pair, monkeypatch: pytest.MonkeyPatch, profiling: bool
) -> None:
    expected, skipped = counted(cached[1], lambda: alone(cached[0], REQUEST))
    trio, tally = loaded()
    monkeypatch.setattr(batching, "_GAIN", 1e9)
    pipeline: Any = trio.pipelines[Role.DENOISER]
    pipeline._batcher.profiling = profiling
    run = trio.start(Role.DENOISER, REQUEST, trio.encoded(REQUEST))
    if profiling:
        run.advance()
    else:
        pipeline.advance_together([run])
    assert len(kept(run)) == 4
    run.cancel()
    made = [alone(trio, REQUEST)] if profiling else results(trio, [REQUEST, REQUEST])
    assert pipeline._batcher.caps
    for one in made:
        assert torch.allclose(one, expected, atol=1e-4)
    assert tally.steps_skipped == len(made) * skipped


def test_texts_of_several_lengths_are_kept_as_long_as_they_were_together(
    checkpoint: Callable[[str], Path], sizes: list[int]
) -> None:
    """The shorter text is padded as long as the other request is there, and its streams are shorter afterwards."""
    words = ("a cat", "a very large red circle in front of a blue wall, seen from far above")
    asked = {"height": 32, "width": 48, "num_inference_steps": 10}
    requests = [{**asked, "prompt": text, "seed": seed} for seed, text in enumerate(words)]
    requests[1]["num_inference_steps"] = 5
    folder = checkpoint("qwen_t2i")
    plain, _ = loaded(folder, step_cache=0.0, joins=False)
    trio, tally = loaded(folder, step_cache=0.9)
    for made, request in zip(results(trio, requests), requests, strict=True):
        assert 0 < error(made, alone(plain, request)) < 0.05
    assert tally.steps_skipped > 0
    assert 2 in sizes


class Requests:
    """Steps of requests on one model, as whoever runs them together computes them."""

    def __init__(self, count: int) -> None:
        self.model = Shallow()
        self.tally = Tally()
        self.memory = StepMemory()
        self.batcher = ForwardBatcher(memory=self.memory)
        install(self.model, "model", THRESHOLD, self.memory, self.tally)
        self.batcher.install(self.model)
        self.states = [SimpleNamespace(**{FIELD: {}}) for _ in range(count)]

    def step(self, *given: float | None) -> list[Tensor]:
        """One step of each request that is given something, a row of it; what they get."""
        runs: list[tuple[greenlet, Call]] = []
        self.batcher.collecting = True
        for state, value in zip(self.states, given, strict=True):
            if value is not None:
                run = greenlet(lambda state=state, value=value: self._compute(state, value), parent=getcurrent())
                runs.append((run, run.switch()))
        self.batcher.collecting = False
        self.batcher.run([call for _, call in runs])
        return [run.switch(call.result) for run, call in runs]

    def _compute(self, state: Any, value: float) -> Tensor:
        self.memory.enter(state)
        try:
            return self.model(torch.full((1, 3), value))
        finally:
            self.memory.leave()


@pytest.mark.usefixtures("sizes")
def test_a_shared_forward_is_passed_over_only_if_all_of_its_requests_may() -> None:
    requests = Requests(2)
    requests.step(8.0, 80.0)
    assert requests.tally.steps_skipped == 0
    steady, changed = requests.step(8.0, 40.0)
    assert requests.tally.steps_skipped == 0
    assert float(steady[0, 0]) == 1.0
    assert float(changed[0, 0]) == 5.0
    requests.step(8.0, 40.0)
    assert requests.tally.steps_skipped == 2


@pytest.mark.usefixtures("sizes")
def test_each_request_gets_what_its_own_rest_added() -> None:
    """Each is a little off what it was before, so that its rest shows in what it gets; also when the order is another,
    one computes alone for a while, or has just come."""
    requests = Requests(2)
    requests.step(8.0, 80.0)
    for given in ((8.16, 81.6), (8.16, None), (None, 81.6), (8.16, 81.6)):
        made = [float(row[0, 0]) for row in requests.step(*given)]
        expected = [value / 2 - kept for value, kept in zip(given, (3.0, 30.0), strict=True) if value is not None]
        assert made == pytest.approx(expected)
    assert requests.tally.steps_skipped == 6
    requests.states.reverse()
    assert [float(row[0, 0]) for row in requests.step(81.6, 8.16)] == pytest.approx([10.8, 1.08])
    assert requests.tally.steps_skipped == 8
    requests.states.append(SimpleNamespace(**{FIELD: {}}))
    requests.states.pop(0)
    assert [float(row[0, 0]) for row in requests.step(8.16, 16.0)] == pytest.approx([1.02, 2.0])
    assert requests.tally.steps_skipped == 8


@pytest.mark.usefixtures("sizes")
def test_a_forward_outside_a_step_shares_one_and_keeps_nothing() -> None:
    requests = Requests(2)
    requests.states[0] = SimpleNamespace()
    requests.step(8.0, 80.0)
    assert [float(row[0, 0]) for row in requests.step(8.0, 80.0)] == [1.0, 10.0]
    assert requests.tally.steps_skipped == 0
    assert set(vars(requests.states[0])) == set()
    assert [float(row[0, 0]) for row in requests.step(None, 81.6)] == pytest.approx([10.8])
    assert requests.tally.steps_skipped == 1
