"""The doctor on a GPU machine, as torch would describe it."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
import torch
from torch.cuda import nccl

from triptych.accel import attention
from triptych.cli import accelerations as module
from triptych.cli.accelerations import accelerations
from triptych.cli.finding import Finding


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where starts keep what they measure."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "triptych" / attention.KEPT


def on(
    monkeypatch: pytest.MonkeyPatch,
    *,
    gpus: int = 1,
    capability: tuple[int, int] = (9, 0),
    backends: tuple[str, ...] = ("flash3", "cudnn", "native"),
    packages: dict[str, str] | None = None,
    trouble: str = "",
) -> dict[str, Finding]:
    """What is said of such a machine."""
    installed = {"triton": "3.5", "torchao": "0.15"} if packages is None else packages

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(attention, "present", lambda _: backends)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(module, "trouble", lambda _: trouble)
    return {finding.what: finding for finding in accelerations()}


def test_what_is_there_is_named_with_the_option_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on(monkeypatch)
    assert [finding.verdict for finding in found.values()] == ["ok"] * 3
    assert found["attention"].found.startswith("flash3, cudnn, native; auto takes")
    assert "triton 3.5" in found["compiling"].found
    assert "torchao 0.15, for --quant" in found["fp8"].found


def test_what_was_measured_at_an_earlier_start_is_shown(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another GPU")
    monkeypatch.setattr(attention, "present", lambda _: ("cudnn", "native"))
    monkeypatch.setattr(attention, "_measure", lambda *_: 9.0)
    attention.choose(torch.device("cuda"), heads=12, head_dim=128, tokens=32768, kept=cache)
    assert "measured" not in on(monkeypatch)
    monkeypatch.setattr(
        attention, "_measure", lambda name, *_: {"flash3": 0.0088, "cudnn": 0.012, "native": 0.0105}[name]
    )
    attention.choose(torch.device("cuda"), heads=12, head_dim=128, tokens=32768, kept=cache)
    found = on(monkeypatch)["measured"].found
    assert found.startswith("attention of 12 x 128, 32768 tokens: flash3 8.80 ms, native 10.50 ms, cudnn 12.00 ms")
    assert str(cache) in found


def test_what_lacks_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on(monkeypatch, backends=("cudnn", "native"), packages={})
    assert [finding.verdict for finding in found.values()] == ["warn"] * 3
    assert "triptych[hopper]" in found["attention"].mend
    assert "triton" in found["compiling"].mend
    assert "triptych[quant]" in found["fp8"].mend


def test_why_triton_builds_no_kernel_is_said_as_a_server_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with gcc and without Python's headers the doctor found nothing, and servers ran the stock path."""
    found = on(monkeypatch, trouble="Triton builds no kernels here: fatal error: Python.h: No such file")["compiling"]
    assert found.verdict == "warn"
    assert found.found == "triton 3.5: Triton builds no kernels here: fatal error: Python.h: No such file"
    assert "python3-dev" in found.mend


def test_a_kernel_is_built_for_it_and_not_taken_from_what_was_built_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(_: torch.device) -> str:
        folder = Path(os.environ["TRITON_CACHE_DIR"])
        assert not list(folder.iterdir())
        (tmp_path / "seen").write_text(str(folder))
        return ""

    on(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "trouble", build)
    assert [finding.verdict for finding in accelerations()] == ["ok"] * 3
    assert not Path((tmp_path / "seen").read_text()).exists()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)


def test_a_full_gpu_is_no_lack_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.device) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    on(monkeypatch)
    monkeypatch.setattr(module, "trouble", full)
    (found,) = (finding for finding in accelerations() if finding.what == "compiling")
    assert found.verdict == "ok"
    assert "could not be tried" in found.found


def test_what_a_gpu_cannot_do_is_no_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on(monkeypatch, capability=(8, 0), backends=("native",), packages={"triton": "3.5"})
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert "compute capability 8.0; 8.9 is needed" in found["fp8"].found


def test_several_gpus_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on(monkeypatch, gpus=2)
    assert found["nccl"].found.startswith("2.28.9")
    assert "through host memory" in found["gpu to gpu"].found
