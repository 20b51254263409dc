"""Errors of forwards on what a request of the embedded model gives its denoiser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from triptych.bench import fidelity
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.pipeline.load import load_pipeline

SMALL = ["--shape", "64x64x5", "--steps", "2", "--device", "cpu"]


def test_every_forward_of_a_request_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert fidelity.main(["tiny", *SMALL, "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    assert [row["variant"] for row in rows] == ["stock", "lossless"]
    for row in rows:
        assert row["forwards"] == 4  # two steps of two branches of guidance
        assert 1e-4 < row["median"] <= row["worst"] < 5e-2
    assert "lossless │        4 │" in capsys.readouterr().out


def test_a_variant_that_computes_otherwise_has_a_larger_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(config: ModelConfig, roles: tuple[Role, ...], device: str) -> Any:
        pipeline: Any = load_pipeline(config, roles, device)
        if config.profile == "lossless":
            model: Any = pipeline.component(Role.DENOISER, "transformer")
            worse: nn.Linear = model.blocks[0].ffn.net[2]
            worse.weight.data = worse.weight.to(torch.float8_e4m3fn).to(worse.weight.dtype)
        return pipeline

    monkeypatch.setattr(fidelity, "load_pipeline", loaded)
    params = {"prompt": "a red ball", "seed": 0, "num_inference_steps": 2, "width": 64, "height": 64, "num_frames": 5}
    stock, worse = fidelity.run(ModelConfig(path="tiny", device="cpu"), params, ["lossless"])
    assert worse.mean > 1.05 * stock.mean


def test_an_unknown_profile_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="'quick' is none of lossless, fast"):
        fidelity.main(["tiny", "--profiles", "quick"])
