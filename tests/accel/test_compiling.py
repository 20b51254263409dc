"""Compilations are counted, and compiled code is only run from a folder that nobody else can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from triptych.accel.compiling import count_compilations, keep_graphs_in
from triptych.accel.tally import Tally
from triptych.errors import ConfigError


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "before")  # put back afterwards


@pytest.mark.usefixtures("environment")
def test_graphs_and_kernels_are_kept_below_the_folder(tmp_path: Path) -> None:
    keep_graphs_in(tmp_path / "cache")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("environment")
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by nobody else"):
        keep_graphs_in(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == "before"


def test_each_shape_is_one_compilation_and_a_known_one_none() -> None:
    tally = Tally()
    count_compilations(tally)
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(3))
    double(torch.ones(3))
    assert tally.compilations == 1
    double(torch.ones(5))
    assert tally.compilations == 2
    assert tally.compile_seconds > 0
