"""The doctor names what is wrong with a machine and how to mend it."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from triptych.cli import doctor
from triptych.cli.accelerations import gpudirect
from triptych.cli.doctor import GIB, findings
from triptych.cli.finding import Finding
from triptych.cli.main import main
from triptych.launch.ports import free_ports, listen

Usage = namedtuple("Usage", "total used free")


def find(what: str, folder: Path, port: int = 30000, scheduler: int = 5555) -> Finding:
    return next(f for f in findings(folder, port, scheduler) if f.what == what)


def test_this_machine_can_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port, scheduler, *_ = free_ports(5)
    words = ["doctor", "--output-dir", str(tmp_path), "--port", str(port), "--scheduler-port", str(scheduler)]
    assert main(words) == 0
    report = capsys.readouterr().out
    assert [line for line in report.splitlines() if line.startswith("fail")] == []
    for what in ("python", "torch", "gpu", "acceleration", "mooncake", "ports", "codecs", "disk", "shared memory"):
        assert what in report


def test_a_taken_port_is_named_with_a_way_out(tmp_path: Path) -> None:
    port, scheduler, *_ = free_ports(5)
    with listen("127.0.0.1", scheduler + 2, "port"):
        finding = find("ports", tmp_path, port, scheduler)
    assert finding.verdict == "warn"
    assert str(scheduler + 2) in finding.found
    assert "--scheduler-port" in finding.mend


def test_ports_that_collide_are_a_failure(tmp_path: Path) -> None:
    finding = find("ports", tmp_path, 5557, 5555)
    assert finding.verdict == "fail"
    assert "collides" in finding.found


def test_a_full_disk_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(GIB, GIB, GIB // 2))
    finding = find("disk", tmp_path / "not" / "there" / "yet")
    assert finding.verdict == "fail"
    assert "--output-dir" in finding.mend


def test_little_shared_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    finding = find("shared memory", tmp_path)
    assert finding.verdict == "warn"
    assert "64 of 64 MiB" in finding.found
    assert "--shm-size" in finding.mend


def test_two_mooncake_builds_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.3")
    finding = find("mooncake", tmp_path)
    assert finding.verdict == "fail"
    assert "pip uninstall" in finding.mend


def test_an_rdma_adapter_in_use_is_named_with_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state in (("mlx5_1", "4: ACTIVE"), ("mlx5_0", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        (tmp_path / "adapters" / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / "adapters" / name / "ports" / "1" / "state").write_text(state + "\n")
    monkeypatch.setattr("triptych.transport.adapters.LISTED", tmp_path / "adapters")
    assert "--disagg-ib-device mlx5_0,mlx5_1;" in find("rdma", tmp_path).found


@pytest.mark.parametrize(
    ("module", "bindings", "dma_buf", "build", "found", "mend"),
    [
        (True, True, False, "-non-cuda", "possible: the kernel module nvidia_peermem is loaded", ""),
        (False, True, True, "-cuda13", "possible: the driver exports GPU memory as DMA-BUF", ""),
        (False, True, True, "-non-cuda", "RDMA through host memory: the driver exports", "triptych[cuda13]"),
        (False, True, False, "-cuda13", "RDMA through host memory: the kernel module nvidia_peermem", "modprobe"),
        (True, False, False, "-cuda13", "RDMA through host memory", "cuda-bindings"),
    ],
)
def test_whether_rdma_gets_at_gpu_memory_is_said_and_what_it_lacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: bool,
    bindings: bool,
    dma_buf: bool,
    build: str,
    found: str,
    mend: str,
) -> None:
    monkeypatch.setattr("triptych.transport.adapters.MODULES", tmp_path)
    monkeypatch.setattr(
        "triptych.cli.accelerations.installed",
        lambda name: "0.3" if name == f"mooncake-transfer-engine{build}" else None,
    )
    if module:
        (tmp_path / "nvidia_peermem").mkdir()
    finding = gpudirect(bindings=bindings, dma_buf=dma_buf)
    assert finding.verdict == "ok"
    assert finding.found.startswith(found)
    assert mend in finding.mend
    assert bool(mend) == bool(finding.mend)


def test_an_engine_that_never_comes_up_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the doctor itself ended with a traceback."""
    monkeypatch.setattr(doctor, "_IMPORT_SECONDS", 1e-9)
    finding = find("mooncake", tmp_path)
    assert finding.verdict == "fail"
    assert "import mooncake.engine" in finding.mend


def test_a_missing_system_library_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    finding = find("libibverbs", tmp_path)
    assert finding.verdict == "fail"
    assert "libibverbs1" in finding.mend
