"""Pieces of files on their way to a device: the right bytes in the right places, errors that name what it was."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from triptych.pipeline import staging
from triptych.pipeline.staging import Arrival, CudaLane, Staging
from triptych.pipeline.stored import Stored, stored_tensors

from .lanes import Cuda, LateLane
from .test_readahead import private_bytes


def some_tensors() -> dict[str, Tensor]:
    """Empty, one number, less than a piece of 4 KiB, exactly one, many, and no multiple of it."""
    made = torch.Generator().manual_seed(5)
    return {
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
        "small": torch.randn(3, 5, generator=made),
        "one": torch.randn(1024, generator=made),
        "many": torch.randn(64, 1000, generator=made),
        "half": torch.randn(33, 77, generator=made).to(torch.bfloat16),
        "whole": torch.randint(-(1 << 60), 1 << 60, (2, 3001), generator=made),
        "bytes": torch.randint(0, 255, (4099,), generator=made, dtype=torch.uint8),
        "yes": torch.rand(130, generator=made) > 0.5,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(some_tensors(), path)
    return path


def stored(file: Path) -> dict[str, Stored]:
    found = stored_tensors([file])
    assert found is not None
    return found


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


@pytest.mark.parametrize(("pieces", "threads"), [(1, 1), (1, 4), (2, 1), (3, 8)])
def test_every_tensor_arrives_as_it_was_stored(file: Path, pieces: int, threads: int) -> None:
    lane = LateLane()
    with Staging(lane, piece=4096, pieces=pieces, readers=threads) as staging:
        begun = {name: staging.begin(tensor) for name, tensor in stored(file).items()}
        arrived = {name: tensor.arrived().clone() for name, tensor in begun.items()}
    expected = some_tensors()
    assert arrived.keys() == expected.keys()
    for name, tensor in expected.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor), name
    assert staging.nbytes == lane.sent_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert not lane.locked
    assert not readers()


def test_weights_that_go_to_one_gpu_open_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: each process on another GPU than the first held half a GB of the first one, too."""
    cuda = Cuda()
    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "Event", cuda.event)
    monkeypatch.setattr(staging, "page_lock", lambda memory, gpu: 0)
    monkeypatch.setattr(staging, "page_unlock", lambda memory, gpu: None)
    arrived: dict[str, Tensor] = {}
    with Staging(CudaLane(cuda.OURS), piece=4096, pieces=2, readers=2) as way:
        for name, tensor in stored(file).items():
            arrived[name] = way.begin(tensor).arrived()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in some_tensors().items())
    assert cuda.opened == {cuda.OURS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_tensor_that_is_cast_has_the_bytes_of_a_cast_in_host_memory(file: Path, dtype: torch.dtype) -> None:
    with Staging(LateLane(), piece=4096, pieces=2, readers=2) as staging:
        arrived = staging.begin(stored(file)["many"], dtype).arrived().clone()
    assert arrived.dtype == dtype
    assert torch.equal(arrived, some_tensors()["many"].to(dtype))


def test_a_file_that_ends_early_while_it_is_read_is_an_error_that_names_it(file: Path) -> None:
    found = stored(file)
    os.truncate(file, found["many"].offset + 10_000)
    lane = LateLane()
    with Staging(lane, piece=4096, pieces=2, readers=3) as staging:
        begun = staging.begin(found["many"])
        with pytest.raises(OSError, match=r"weights\.safetensors ends at byte \d+, in the middle of 'many'"):
            begun.arrived()
    assert not lane.locked
    assert not readers()


def test_a_file_that_cannot_be_opened_is_an_error(file: Path) -> None:
    found = stored(file)
    file.unlink()
    with Staging(LateLane(), piece=4096, pieces=2, readers=1) as staging, pytest.raises(FileNotFoundError):
        staging.begin(found["one"])


def test_a_copy_that_fails_ends_the_loading_and_nothing_waits_for_its_buffer(file: Path) -> None:
    lane = LateLane(fails_at=3)
    with Staging(lane, piece=4096, pieces=1, readers=4) as staging:
        begun = [staging.begin(tensor) for tensor in stored(file).values()]
        with pytest.raises(RuntimeError, match="the bus is gone"):
            [tensor.arrived() for tensor in begun]
    assert not lane.locked
    assert not readers()


def test_nothing_begins_after_the_end(file: Path) -> None:
    staging = Staging(LateLane(), piece=4096, pieces=1, readers=1)
    staging.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        staging.begin(stored(file)["one"])


def test_a_file_cut_short_is_refused_before_it_is_read(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(Exception, match="incomplete metadata"):
        stored_tensors([file])


class Gone(LateLane):
    """To a device that keeps nothing; what this process has of its own is looked at with every piece."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def send(self, source: Tensor, target: Tensor) -> Arrival:
        self.most = max(self.most, private_bytes())
        return super().send(source, target)


def test_the_ring_is_all_of_the_host_memory_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "large.safetensors"
    save_file({str(i): torch.full((4_000_000,), float(i)) for i in range(6)}, file)
    lane = Gone()
    before = private_bytes()
    with Staging(lane, piece=1 << 20, pieces=4, readers=2) as staging:
        for tensor in [staging.begin(tensor, torch.bfloat16) for tensor in stored(file).values()]:
            tensor.arrived()
    assert lane.sent_bytes == 96_000_000
    assert lane.most - before < (4 << 20) + 30_000_000
