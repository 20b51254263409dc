"""The folder of compiled graphs forgets what nobody uses."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from triptych.accel.unused import SECONDS, forget_unused

NOW = 2_000_000_000.0


def lies(path: Path, unused: float) -> Path:
    """A file that nobody has read or written for so long, nor its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"compiled")
    for one in (path, path.parent):
        os.utime(one, (NOW - unused, NOW - unused))
    return path


def test_what_was_not_used_for_long_goes_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graphs, kernels = tmp_path / "inductor", tmp_path / "triton"
    old = lies(graphs / "fxgraph" / "ab" / "old", SECONDS + 1)
    new = lies(graphs / "fxgraph" / "ab" / "new", SECONDS - 1)
    read = lies(graphs / "cd" / "read.py", SECONDS * 2)
    os.utime(read, (NOW - 5, NOW - SECONDS * 2))
    kernel = lies(kernels / "OLD" / "kernel.cubin", SECONDS + 1)
    lies(kernels / "USED" / "kernel.json", SECONDS * 3)
    used = lies(kernels / "USED" / "kernel.cubin", 5)
    with caplog.at_level(logging.INFO, "triptych"):
        forget_unused(graphs, kernels, now=NOW)
    assert not old.exists()
    assert not kernel.parent.exists()
    assert new.exists()
    assert read.exists()
    assert {path.name for path in used.parent.iterdir()} == {"kernel.json", "kernel.cubin"}, "its files stay together"
    assert "removed 2 graphs and kernels" in caplog.text


def test_nothing_is_said_of_folders_that_are_in_use_or_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "triptych"):
        forget_unused(tmp_path / "inductor", tmp_path / "triton", now=NOW)
        lies(tmp_path / "inductor" / "ab" / "new", 1)
        forget_unused(tmp_path / "inductor", tmp_path / "triton", now=NOW)
    assert not caplog.records
    assert (tmp_path / "inductor" / "ab" / "new").exists()
