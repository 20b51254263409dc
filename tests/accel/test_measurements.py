"""Measurements outlive a process; a file that cannot be used costs nothing but the measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.accel.measurements import read_measurements, write_measurements


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "attention.json"
    assert read_measurements(file, "here") is None
    write_measurements(file, "here", {"a": 0.5, "b": 0.25})
    write_measurements(file, "there", {"a": 0.125})
    assert read_measurements(file, "here") == {"a": 0.5, "b": 0.25}
    assert read_measurements(file, "there") == {"a": 0.125}
    assert [path.name for path in file.parent.iterdir()] == ["attention.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"here": 1}', '{"here": {"a": "fast"}}', "\x00"])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "attention.json"
    file.write_text(text)
    assert read_measurements(file, "here") is None
    write_measurements(file, "here", {"a": 0.5})
    assert read_measurements(file, "here") == {"a": 0.5}


def test_a_folder_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    write_measurements(tmp_path / "file" / "attention.json", "here", {"a": 0.5})
    assert "not kept" in caplog.text
