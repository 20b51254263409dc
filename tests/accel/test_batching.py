"""Forwards that are joined give each request its own result; what cannot be joined is computed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from triptych.accel import batching, cuda_graphs
from triptych.accel.batching import Call, ForwardBatcher
from triptych.accel.cuda_graphs import CudaGraphs
from triptych.accel.sizes import Sizes

from .test_cuda_graphs import Machine


class Model(nn.Module):
    """Doubles, and remembers how much it was given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, x: Tensor, grids: list[tuple[int, int]], scale: float = 2.0) -> tuple[Tensor]:
        self.batches.append(x.shape[0])
        assert len(grids) == x.shape[0]
        if bool((x < 0).any()):
            raise ValueError("negative")
        return (x * scale,)


@pytest.fixture
def model() -> Model:
    return Model()


def parked(model: Model, batcher: ForwardBatcher, *arguments: dict[str, Any]) -> list[tuple[greenlet, Call]]:
    batcher.install(model)
    batcher.collecting = True
    calls: list[tuple[greenlet, Call]] = []
    for given in arguments:
        run = greenlet(lambda given=given: model(**given), parent=getcurrent())
        calls.append((run, run.switch()))
    batcher.collecting = False
    return calls


def given(value: float, width: int = 3) -> dict[str, Any]:
    return {"x": torch.full((1, width), value), "grids": [(1, width)]}


def results(calls: list[tuple[greenlet, Call]], batcher: ForwardBatcher) -> list[Any]:
    batcher.run([call for _, call in calls])
    return [call.error or run.switch(call.result) for run, call in calls]


def test_equal_shapes_are_joined_and_each_gets_its_own(model: Model) -> None:
    batcher = ForwardBatcher()
    calls = parked(model, batcher, *(given(float(n)) for n in range(5)), given(9.0, width=4))
    for _, call in calls:
        batcher.caps[call.key] = 4
    answers = results(calls, batcher)
    assert [float(answer[0][0, 0]) for answer in answers] == [0.0, 2.0, 4.0, 6.0, 8.0, 18.0]
    assert model.batches == [4, 1, 1]


def test_calls_that_differ_in_a_setting_are_not_joined(model: Model) -> None:
    batcher = ForwardBatcher()
    calls = parked(model, batcher, given(1.0), {**given(1.0), "scale": 3.0})
    assert [float(answer[0][0, 0]) for answer in results(calls, batcher)] == [2.0, 3.0]
    assert model.batches == [1, 1]


def test_an_error_comes_to_the_request_that_it_is_of_and_not_to_those_that_shared_its_forward(model: Model) -> None:
    batcher = ForwardBatcher()
    calls = parked(model, batcher, given(1.0), given(-1.0), given(1.0), given(1.0), given(1.0, width=4))
    batcher.caps[calls[0][1].key] = 4
    answers = results(calls, batcher)
    assert [type(answer) for answer in answers] == [tuple, ValueError, tuple, tuple, tuple]


def limited(model: Model, monkeypatch: pytest.MonkeyPatch, rows: int) -> list[int]:
    """Give the model memory for so many rows at once; what is answered says how many, and may be changed."""
    memory = [rows]

    def compute(x: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        model.batches.append(x.shape[0])
        if x.shape[0] > memory[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x

    monkeypatch.setattr(model, "forward", compute)
    return memory


def test_a_forward_that_is_too_large_is_computed_in_parts_and_not_tried_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(model, monkeypatch, 2)
    batcher = ForwardBatcher()
    calls = parked(model, batcher, *(given(float(n)) for n in range(8)))
    batcher.caps[calls[0][1].key] = 8  # as it was measured when more memory was free
    batcher.run([call for _, call in calls])
    assert [float(call.result[0, 0]) for _, call in calls] == [0, 1, 2, 3, 4, 5, 6, 7]
    model.batches.clear()
    batcher.run([call for _, call in calls])
    assert model.batches == [2, 2, 2, 2]


def test_what_there_was_no_memory_for_is_tried_again_later(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: after one shortage forwards had half as many requests until the end of the process."""
    memory = limited(model, monkeypatch, 2)
    batcher = ForwardBatcher()
    calls = [call for _, call in parked(model, batcher, *(given(float(n)) for n in range(4)))]
    batcher.caps[calls[0].key] = 4
    batcher.run(calls)
    model.batches.clear()
    for _ in range(200):
        batcher.run(calls)
    assert 0 < model.batches.count(4) < 5, "still too large: tried seldom"
    memory[0] = 4
    for _ in range(1000):
        batcher.run(calls)
    model.batches.clear()
    batcher.run(calls)
    assert model.batches == [4]


def test_more_than_are_computed_at_once_are_not_measured(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.accel.batching.time.perf_counter", lambda: 0.0)
    monkeypatch.setattr("triptych.accel.batching._GAIN", 1.0)
    batcher = ForwardBatcher(most=3)
    calls = parked(model, batcher, *(given(float(n)) for n in range(3)))
    results(calls, batcher)
    assert max(model.batches) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("no")])
def test_what_fails_while_it_is_measured_fails_by_itself(
    model: Model, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def compute(x: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        if x.shape[1] == 4:
            raise error
        return x

    monkeypatch.setattr(model, "forward", compute)
    batcher = ForwardBatcher()
    calls = parked(model, batcher, given(1.0, width=4), given(2.0, width=4), given(3.0), given(4.0))
    batcher.run([call for _, call in calls])
    assert [call.error for _, call in calls] == [error, error, None, None]
    assert calls[0][1].key not in batcher.caps


def test_as_many_are_joined_as_the_memory_holds(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(model, monkeypatch, 4)
    monkeypatch.setattr("triptych.accel.batching.time.perf_counter", lambda: 0.0)
    monkeypatch.setattr("triptych.accel.batching._GAIN", 1.0)
    batcher = ForwardBatcher()
    calls = parked(model, batcher, *(given(float(n)) for n in range(8)))
    batcher.run([call for _, call in calls])
    assert set(batcher.caps.values()) == {4}
    assert all(call.error is None for _, call in calls)


def test_forwards_that_become_cuda_graphs_are_measured_as_such(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched kernel by kernel a forward takes as long for one as for eight, replayed as long as it computes."""
    clock, seen = [0.0], dict[int, int]()

    def compute(x: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        seen[x.shape[0]] = seen.get(x.shape[0], 0) + 1
        clock[0] += 0.050 if seen[x.shape[0]] < 5 else 0.008 * x.shape[0]
        model.batches.append(x.shape[0])
        return x

    monkeypatch.setattr("triptych.accel.batching.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(model, "forward", compute)
    batcher = ForwardBatcher()
    calls = parked(model, batcher, *(given(1.0) for _ in range(8)))
    batcher.run([call for _, call in calls])
    assert set(batcher.caps.values()) == {1}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("time.perf_counter", lambda: made.now)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(batching, "_wait", lambda device: made.synchronize())
    monkeypatch.setattr(cuda_graphs, "_recordable", lambda leaves: True)
    return made


@pytest.mark.parametrize(("launching", "computing"), [(0.03, 0.0084), (0.08, 0.03), (0.1, 0.04), (0.13, 0.05)])
def test_the_call_that_a_cuda_graph_is_made_of_is_no_measure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, launching: float, computing: float
) -> None:
    """Symptom: where launching takes 75 ms and more, the call that recorded a graph ended the measuring, and since it
    took as long for four requests as for one, four were joined that gain nothing from each other."""

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            machine.forward(launching, computing * x.shape[0])
            return x

    class Recorded:
        def replay(self, leaves: list[Any]) -> Tensor:
            machine.forward(0.0004, computing * leaves[0].shape[0])
            return leaves[0]

    def recorded(model: object, compute: object, call: Any) -> Recorded:
        for _ in range(4):  # thrice to see what it takes, and to record
            machine.forward(launching, computing)
            machine.synchronize()
        return Recorded()

    monkeypatch.setattr(cuda_graphs, "_recorded", recorded)
    model, batcher = Slow(), ForwardBatcher(profiling=True)
    CudaGraphs(sizes=Sizes()).install(model)
    batcher.install(model)
    model(torch.ones(1, 4))
    assert list(batcher.caps.values()) == [1]


@pytest.mark.parametrize(("brings_weights", "computed"), [(False, {1}), (True, {1, 2})])
def test_of_forwards_that_take_long_by_themselves_no_two_are_joined_to_see_whether_it_pays(
    model: Model, monkeypatch: pytest.MonkeyPatch, brings_weights: bool, computed: set[int]
) -> None:
    """Symptom: large shapes were compiled a second time, for two requests, only to learn that it does not pay. Where
    weights come from host memory with each forward, it is not the computing that takes long."""
    clock = [0.0]

    def compute(x: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        clock[0] += 0.4 * x.shape[0]
        model.batches.append(x.shape[0])
        return x

    monkeypatch.setattr("triptych.accel.batching.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(model, "forward", compute)
    batcher = ForwardBatcher(brings_weights=brings_weights)
    calls = parked(model, batcher, *(given(1.0) for _ in range(4)))
    batcher.run([call for _, call in calls])
    assert set(batcher.caps.values()) == {1}
    assert set(model.batches) == computed


@pytest.mark.parametrize(("cost", "cap"), [(lambda n: 0.1 + 0.01 * n, 8), (lambda n: 0.1 * n, 1)])
def test_how_many_are_joined_is_measured_once_for_a_shape(
    model: Model, monkeypatch: pytest.MonkeyPatch, cost: Callable[[int], float], cap: int
) -> None:
    clock = [0.0]

    def compute(x: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        clock[0] += cost(x.shape[0])
        model.batches.append(x.shape[0])
        return x

    monkeypatch.setattr("triptych.accel.batching.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(model, "forward", compute)
    batcher = ForwardBatcher()
    calls = parked(model, batcher, *(given(1.0) for _ in range(8)))
    batcher.run([call for _, call in calls])
    assert set(batcher.caps.values()) == {cap}
    assert model.batches[-1] == cap
    measured = len(model.batches)
    batcher.run([call for _, call in calls])
    assert len(model.batches) == measured + 8 // cap
