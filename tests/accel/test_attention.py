"""A backend that is installed but does not run is left out, with the reason in the log, and stops nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triptych.accel import attention, flash3, sage
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.pipeline.load import load_pipeline

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for backend in (flash3, sage):
        backend._loads.cache_clear()
    yield
    for backend in (flash3, sage):
        backend._loads.cache_clear()


@pytest.mark.parametrize(
    "failure",
    [
        "import nowhere.to_be_found",
        "raise OSError('undefined symbol: _ZN3c10')",
        "raise RuntimeError('operator exists already')",
        "",  # loads, and brings no operator
    ],
)
def test_a_wheel_for_another_torch_is_left_out_and_named(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for package in ("fa3_fwd", "sageattention"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(failure if package == "sageattention" else "")
        (tmp_path / package / "_C.py").write_text(failure)
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, "triptych"):
        have = attention.present(GPU)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fa3_fwd", "sageattention")]:
        monkeypatch.delitem(sys.modules, name)
    assert not {"flash3", "flash3-fp8"} & set(have)
    assert "native" in have
    assert caplog.text.count("FlashAttention-3 is left out") == 1
    with pytest.raises(ConfigError, match=r"attention-backend='flash3'.*present: "):
        attention.preferred("flash3", GPU)


def test_kernels_that_do_not_run_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, *_: object) -> float:
        if name != "native":
            raise {"cudnn": RuntimeError, "flash2": TypeError, "flash3": ImportError}[name]("no")
        return 1.0

    monkeypatch.setattr(attention, "present", lambda _: ("flash3", "cudnn", "flash2", "native"))
    monkeypatch.setattr(attention, "_measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert attention.choose(GPU, heads=2, head_dim=64, tokens=8).backend == "native"


def test_what_a_backend_compiles_counts_whatever_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")  # put back afterwards
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    tally = Tally()
    config = ModelConfig(
        path="tiny", device="cpu", profile="stock", attention_backend="flash3-fp8,native", cache_dir=tmp_path / "cache"
    )
    load_pipeline(config, (Role.DENOISER,), "cpu", tally)
    torch.compile(lambda x: x + 3, backend="eager")(torch.ones(2))
    assert tally.compilations == 1
