"""What a call takes is measured once it is what it will stay; the GPU and the clock are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accel.test_cuda_graphs import Machine
from triptych.accel import cuda_graphs
from triptych.accel.cuda_graphs import CudaGraphs
from triptych.accel.sizes import Sizes
from triptych.bench.timing import Times, measure


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    class Event:
        """Passed when the GPU has done what it was given before."""

        at = 0.0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(made.now, made.gpu_free_at)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    monkeypatch.setattr("time.perf_counter", lambda: made.now)
    for name, stand_in in (
        ("synchronize", made.synchronize),
        ("Event", Event),
        ("reset_peak_memory_stats", lambda: None),
        ("max_memory_allocated", lambda: 3 << 30),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graphs, "_recordable", lambda leaves: True)
    return made


class Model(nn.Module):
    """Counts its calls, and those that replay it."""

    def __init__(self, machine: Machine, launching: float, computing: float) -> None:
        super().__init__()
        self.machine, self.launching, self.computing = machine, launching, computing
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.machine.forward(self.launching, self.computing)
        return x

    def replay(self, leaves: list[Any]) -> Any:
        self.calls += 1
        self.machine.forward(0.0004, self.computing)
        return leaves[0]


def measured(model: Model, repeats: int) -> Times:
    """As of a profile that may record its forwards."""
    CudaGraphs(sizes=Sizes()).install(model)
    model(torch.ones(1))
    return measure(lambda: model(torch.ones(1)), repeats, settles=True)


def test_a_small_forward_is_measured_as_the_recording_that_it_becomes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: with few repeats the time of a small shape was that of making its recording."""
    model = Model(machine, 0.03, 0.01)

    def recorded(_: object, compute: object, call: Any) -> Model:
        for _ in range(5):
            machine.forward(0.03, 0.01)
            machine.synchronize()
        return model

    monkeypatch.setattr(cuda_graphs, "_recorded", recorded)
    took = measured(model, 1)
    assert took.waited == pytest.approx(0.01)
    assert took.launched == pytest.approx(0.0004)
    assert took.queued == pytest.approx(0.01)


def test_a_large_forward_is_launched_as_long_as_its_launch_takes(machine: Machine) -> None:
    """Symptom: with one to three repeats that was the whole forward, as it was still looked at."""
    took = measured(Model(machine, 0.03, 0.4), 1)
    assert took.launched == pytest.approx(0.03)
    assert took.waited == took.queued == pytest.approx(0.4)


@pytest.mark.parametrize(("computing", "calls"), [(0.1, 12), (3.0, 8)])
def test_what_takes_long_is_not_computed_more_often_than_tells_something(
    machine: Machine, computing: float, calls: int
) -> None:
    model = Model(machine, 0.03, computing)
    took = measure(lambda: model(torch.ones(1)), 5)
    assert model.calls == calls
    assert took.waited == pytest.approx(computing)
    assert took.peak_gib == 3.0
