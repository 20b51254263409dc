"""For which forwards a CUDA graph is tried, by what their calls are seen to take; the GPU and the clock are made up."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from triptych.accel import cuda_graphs
from triptych.accel.cuda_graphs import CudaGraphs


class Machine:
    """A host and a GPU that take as long as they are told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gpu_free_at = 0.0
        self.tried = 0

    def forward(self, launching: float, computing: float) -> None:
        """The GPU begins with the first launch, and is not done before the last one."""
        self.gpu_free_at = max(self.gpu_free_at, self.now) + computing
        self.now += launching
        self.gpu_free_at = max(self.gpu_free_at, self.now)

    def synchronize(self) -> None:
        self.now = max(self.now, self.gpu_free_at)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    def tried(*_: object) -> None:
        made.tried += 1

    monkeypatch.setattr("time.perf_counter", lambda: made.now)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(cuda_graphs, "_recordable", lambda leaves: True)
    monkeypatch.setattr(cuda_graphs, "_recorded", tried)
    return made


def calls(machine: Machine, *times: tuple[float, float]) -> None:
    """One call for each pair of seconds: that the host takes to launch the forward, and the GPU to compute it."""
    upcoming = iter(times)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            machine.forward(*next(upcoming))
            return x

    model = Model()
    CudaGraphs().install(model)
    for _ in times:
        model(torch.ones(1))


def test_a_forward_that_the_host_holds_up_is_recorded_however_slow_its_second_call_was(machine: Machine) -> None:
    """Symptom: with all graphs in the cache, small shapes took four times as long as after compiling them, since their
    second call took long to launch."""
    calls(machine, (20.0, 0.01), (0.06, 0.01), (0.03, 0.01))
    assert machine.tried == 1


def test_one_call_that_the_gpu_was_slow_in_does_not_settle_it(machine: Machine) -> None:
    calls(machine, (20.0, 0.01), (0.03, 0.2), (0.03, 0.01), (0.03, 0.01))
    assert machine.tried == 1


def test_a_forward_that_hides_its_launches_is_left_alone(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triptych.accel.cuda_graphs"):
        calls(machine, (20.0, 0.4), *[(0.03, 0.4)] * 9)
    assert machine.tried == 0
    assert caplog.messages == ["no CUDA graph: a forward takes 400.00 ms, the host has launched it after 30.00 ms"]


def test_a_large_forward_is_not_recorded_even_where_its_launches_fill_the_queue(machine: Machine) -> None:
    """A recording holds the memory of a whole forward."""
    calls(machine, (20.0, 0.4), *[(0.38, 0.4)] * 9)
    assert machine.tried == 0
