"""For which forwards a CUDA graph is tried, by what their calls are seen to take; the GPU and the clock are made up."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triptych.accel import cuda_graphs
from triptych.accel.cuda_graphs import CudaGraphs
from triptych.accel.recordable import launched_one_by_one, recorded_early
from triptych.accel.shortage import free_memory
from triptych.accel.sizes import Sizes, rehearsing

from .impatient import impatient


class Machine:
    """A host and a GPU that take as long as they are told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gpu_free_at = 0.0
        self.tried = 0
        self.recording: object = None

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

    def tried(model: object, compute: object, call: Any) -> Any:
        made.tried += 1
        return made.recording

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
    impatient(model)
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


class Small(nn.Module):
    """A model that the host takes longer to launch than the GPU to compute."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def forward(self, x: Tensor) -> Tensor:
        self.machine.forward(0.03, 0.01)
        return x


class Replayed:
    """A recording that counts its replays."""

    count = 0

    def replay(self, leaves: list[Any]) -> Any:
        Replayed.count += 1
        return leaves[0]


def test_a_shape_whose_recording_made_room_is_recorded_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: after nine small shapes the first one was launched kernel by kernel until the end of the process."""
    monkeypatch.setattr(Replayed, "count", 0)
    machine.recording = Replayed()

    model = Small(machine)
    impatient(model)
    for round_ in range(2):
        for size in range(1, 100):  # more than are remembered
            for _ in range(4):
                model(torch.ones(size))
            assert Replayed.count == round_ * 99 + size


def test_recordings_are_dropped_when_memory_runs_out_and_made_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replayed, "count", 0)
    machine.recording = Replayed()

    model = Small(machine)
    graphs = impatient(model)
    for round_ in range(1, 3):
        for _ in range(4):
            model(torch.ones(1))
        assert graphs.recordings == 1
        assert Replayed.count == round_
        free_memory(torch.OutOfMemoryError())
        assert graphs.recordings == 0


def test_forwards_that_gpus_exchange_tensors_in_are_neither_recorded_nor_replayed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guidance two GPUs compute a branch each, and without it they may share the tokens of one forward."""
    monkeypatch.setattr(Replayed, "count", 0)
    machine.recording = Replayed()

    model = Small(machine)
    impatient(model)
    with launched_one_by_one():
        for _ in range(9):
            model(torch.ones(1))
    assert machine.tried == 0
    for _ in range(4):
        model(torch.ones(1))
    assert Replayed.count == 1
    with launched_one_by_one():
        model(torch.ones(1))
    assert Replayed.count == 1


def test_kinds_that_do_not_come_again_are_not_recorded(machine: Machine) -> None:
    """Symptom: a request of four steps and a text of new length computed thirteen forwards."""
    model = Small(machine)
    CudaGraphs(sizes=Sizes()).install(model)
    for size in range(1, 9):
        for _ in range(4):
            model(torch.ones(size))
    assert machine.tried == 0


def test_a_kind_that_came_often_is_recorded_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayed, "count", 0)
    machine.recording = Replayed()
    model = Small(machine)
    CudaGraphs(sizes=Sizes()).install(model)
    for size in (1, 2):
        for _ in range(30):
            model(torch.ones(size))
    assert machine.tried == 2
    assert Replayed.count == 2 * 10


def test_what_was_rehearsed_is_recorded_at_once_and_what_was_not_is_waited_for(machine: Machine) -> None:
    """Symptom: on a server with --warmup a request of another size, and of four steps, computed thirteen forwards."""
    model, sizes = Small(machine), Sizes()
    CudaGraphs(sizes=sizes).install(model)
    sizes.install("transformer", model)
    for _ in range(4):
        model(torch.ones(2))
    assert machine.tried == 0
    with rehearsing():
        for _ in range(3):
            model(torch.ones(1))
    assert machine.tried == 1
    for size in (1, 2):
        for _ in range(10):
            model(torch.ones(size))
    assert machine.tried == 1


def test_what_is_measured_is_recorded_however_many_kinds_there_are(machine: Machine) -> None:
    model = Small(machine)
    CudaGraphs(sizes=Sizes()).install(model)
    with recorded_early():
        for _ in range(4):
            model(torch.ones(1))
    assert machine.tried == 1


class Waiting(nn.Module):
    """A model that waits for the GPU, in some of its calls; torch is made up to the extent that it says so."""

    def __init__(self, *calls: bool) -> None:
        super().__init__()
        self.calls = list(calls)

    def forward(self, x: Tensor) -> Tensor:
        if self.calls.pop(0) and torch.cuda.get_sync_debug_mode():
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        return x


@pytest.fixture
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda wish: mode.__setitem__(0, 1 if wish == "warn" else 0))


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(("calls", "tried"), [((True,) * 9, 0), ((True, False), 1), ((False,), 1)])
def test_a_forward_that_waits_for_the_gpu_is_not_tried(
    calls: tuple[bool, ...], tried: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In torch 2.11 a recording that fails leaves the process unable to give memory back or to draw random numbers on
    the GPU. What another thread waits for meanwhile is none of the forward's."""
    records: list[object] = []

    def record(*args: object) -> object:
        records.append(args)
        raise RuntimeError("not in this test")

    monkeypatch.setattr(cuda_graphs, "_record", record)
    model = Waiting(*calls, *[False] * 9)
    call = cuda_graphs.call_of(model.forward, (torch.ones(1),), {})
    with caplog.at_level(logging.INFO, "triptych.accel.cuda_graphs"):
        assert cuda_graphs._recorded(model, model.forward, call) is None  # pyright: ignore[reportPrivateUsage]
    assert len(records) == tried
    assert ("no CUDA graph: something in the forward waits for the GPU" in caplog.messages) == (tried == 0)
    assert torch.cuda.get_sync_debug_mode() == 0
