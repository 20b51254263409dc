"""Which ways a plane takes over RDMA, of which an engine of this process stands in for the adapters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.transport.data.gpu_standin import StandIn
from tests.transport.data.loopback_engine import LoopbackEngine
from triptych.config import TransferConfig, TransferKind
from triptych.errors import ConfigError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data import engine
from triptych.transport.data.gpu_memory import all_export_dma_buf
from triptych.transport.data.plane import settings_between_hosts
from triptych.transport.data.pooled import PooledPlane
from triptych.transport.data.protocol import Payload, Pull
from triptych.transport.data.settings import EngineSettings, Transport

MIB = 1 << 20
R = RequestId("r")
Open = Callable[..., tuple[PooledPlane, LoopbackEngine, StandIn]]
Puller = Callable[..., Pull]


@pytest.fixture
def open_between_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open a plane with GPU memory and an engine, which the test may ask; it is checked and closed at the end."""
    planes: list[PooledPlane] = []
    monkeypatch.setattr(engine, "_in_use", False)

    def start(kind: TransferKind = "auto", transport: Transport = "rdma", *, refuses: bool = False) -> object:
        engines, memory = LoopbackEngine(refuses=refuses), StandIn()
        monkeypatch.setattr(engine, "_loaded", (transport, engines.module))
        config = TransferConfig(kind=kind, pool_bytes=16 * MIB, gpu_pool_bytes=8 * MIB)
        settings = EngineSettings(hostname="here", transport=transport, devices=None)
        plane = PooledPlane(config, InstanceId("i"), Epoch("e"), gpu=None, shared=memory, between_hosts=settings)
        planes.append(plane)
        return plane, engines, memory

    yield start  # type: ignore[misc]
    for plane in planes:
        plane.check_integrity()
        plane.close()


def full(value: int, nbytes: int = 3 * MIB) -> Payload:
    return Payload(tree=b"", tensors=(torch.full((nbytes,), value, dtype=torch.uint8),))


@pytest.mark.parametrize(
    ("kind", "transport", "planes"),
    [
        ("auto", "rdma", ("cuda-ipc", "local", "shm", "gpudirect", "mooncake")),
        ("auto", "tcp", ("cuda-ipc", "local", "shm", "mooncake")),
        ("mooncake", "rdma", ("gpudirect", "mooncake")),
        ("mooncake", "tcp", ("mooncake",)),
        ("gpudirect", "rdma", ("gpudirect", "mooncake")),
        ("gpudirect", "tcp", ("gpudirect", "mooncake")),
    ],
)
def test_adapters_take_gpu_memory_over_rdma_and_over_tcp_where_it_is_forced(
    open_between_hosts: Open, pull: Puller, kind: TransferKind, transport: Transport, planes: tuple[str, ...]
) -> None:
    plane, _, memory = open_between_hosts(kind, transport)
    assert plane.planes == planes
    assert bool(memory.files) == (set(planes) != {"mooncake"})
    manifest = plane.stage(R, full(3))
    assert {locator.plane for locator in manifest.locators} == set(planes)
    got = pull(plane, manifest)
    assert got.plane == planes[0]
    assert got.payload.tensors[0].eq(3).all()


def test_gpu_memory_that_adapters_cannot_reach_is_said_and_gone_without(
    open_between_hosts: Open, pull: Puller, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transport.adapters.MODULES", Path("/nowhere"))
    plane, _, _ = open_between_hosts(refuses=True)
    assert plane.planes == ("cuda-ipc", "local", "shm", "mooncake")
    assert "nvidia_peermem is not loaded" in caplog.text
    assert "go through host memory" in caplog.text
    assert pull(plane, plane.stage(R, full(3))).plane == "cuda-ipc"
    plane.close()
    plane, _, memory = open_between_hosts("mooncake", refuses=True)
    assert plane.planes == ("mooncake",)
    assert memory.files == {}


def test_gpu_memory_that_adapters_cannot_reach_is_an_error_where_it_is_forced(open_between_hosts: Open) -> None:
    with pytest.raises(ConfigError, match="disagg-transfer='gpudirect': Mooncake cannot register GPU memory over rdma"):
        open_between_hosts("gpudirect", refuses=True)
    plane, _, _ = open_between_hosts("gpudirect")  # the one before gave back all that it had
    assert plane.planes == ("gpudirect", "mooncake")


def test_adapters_know_nothing_of_memory_that_is_given_back(open_between_hosts: Open) -> None:
    plane, engines, memory = open_between_hosts("gpudirect")
    assert set(memory.files) < set(engines.registered)
    plane.close()
    assert (engines.registered, memory.files) == ({}, {})


def test_a_transfer_that_hangs_leaves_time_for_host_memory_and_is_not_tried_again_at_once(
    open_between_hosts: Open, pull: Puller, caplog: pytest.LogCaptureFixture
) -> None:
    plane, engines, memory = open_between_hosts("gpudirect")
    first, second = plane.stage(R, full(1)), plane.stage(R, full(2))
    (base,) = memory.files
    engines.hang = range(base, base + 8 * MIB)
    staged = plane.gpu_used_bytes
    got = pull(plane, first, 6.0)
    assert got.plane == "mooncake"
    assert got.payload.tensors[0].eq(1).all()
    assert plane.gpu_used_bytes > staged  # where it may still write
    assert "the deadline passed" in caplog.text
    assert "through host memory for 60 s" in caplog.text
    tried = len(engines.reads)
    assert pull(plane, second).plane == "mooncake"
    assert not any(address in engines.hang for address in engines.reads[tried:])
    engines.let_go()
    until = time.monotonic() + 60
    while plane.gpu_used_bytes > staged and time.monotonic() < until:
        time.sleep(0.01)
    assert plane.gpu_used_bytes == staged


def test_gpu_memory_that_may_still_be_written_is_not_given_back(
    open_between_hosts: Open, pull: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_CLOSE_SECONDS", 0.1)
    plane, engines, memory = open_between_hosts("gpudirect")
    manifest = plane.stage(R, full(1))
    (base,) = memory.files
    engines.hang = range(base, base + 8 * MIB)
    assert pull(plane, manifest, 6.0).plane == "mooncake"
    plane.close()
    assert set(memory.files) < set(engines.registered)
    engines.let_go()


@pytest.mark.parametrize(
    ("module", "exports", "dma_buf"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_gpu_memory_is_exported_where_no_kernel_module_gives_it_to_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool, exports: bool, dma_buf: bool
) -> None:
    monkeypatch.setattr("triptych.transport.adapters.MODULES", tmp_path)
    monkeypatch.setattr(StandIn, "exports_dma_buf", lambda _: exports)
    if module:
        (tmp_path / "nvidia_peermem").mkdir()
    settings = settings_between_hosts(TransferConfig(ib_device="mlx5_0"), StandIn())
    assert settings is not None
    assert settings.dma_buf is dma_buf


def test_a_machine_without_a_driver_gives_no_gpu_memory_to_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with NVIDIA's bindings installed and no driver, asking ended in an error."""

    def init(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    attributes = SimpleNamespace(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED=124)
    bindings: Any = SimpleNamespace(cuInit=init, CUdevice_attribute=attributes)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    assert all_export_dma_buf() is False


@pytest.mark.parametrize(("dma_buf", "said"), [(True, "0"), (False, "1")])
def test_the_engine_is_told_how_it_gets_at_gpu_memory(tmp_path: Path, dma_buf: bool, said: str) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text("import os; print(os.environ['WITH_NVIDIA_PEERMEM'])")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from triptych.transport.data.engine import load
from triptych.transport.data.settings import EngineSettings
load(EngineSettings(hostname="here", transport="rdma", devices=None, dma_buf={dma_buf}))
"""
    env = {name: value for name, value in os.environ.items() if name not in ("MC_FORCE_TCP", "WITH_NVIDIA_PEERMEM")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == said, done.stderr
