"""`triptych models`: the parts of one model, and a model that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.cli.main import main


def test_the_parts_of_a_model_are_shown_by_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["PIPELINE", "SPLIT", "TASK", "GPUS", "SHARE"]
    assert lines[1].split() == [
        "WanPipeline", "modular", "text-to-video", "cfg,", "ulysses,", "ring,", "tp,", "encoder-tp,", "decoder-tp",
        "WanModularPipeline",
    ]  # fmt: skip
    lines = lines[3:]
    assert lines[0].split() == ["ROLE", "BLOCK", "COMPONENTS"]
    assert {line.split()[0] for line in lines[1:]} == {"encoder", "denoiser", "decoder"}
    assert any(line.startswith("decoder") and line.endswith("vae") for line in lines)


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(tmp_path)]) == 2
    assert "has no model_index.json" in capsys.readouterr().err
