"""`triptych config show`: what a process would have, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triptych.cli.main import main


def show(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    assert main(["config", "show", *words]) == 0
    return {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}


def test_each_value_is_shown_with_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "role.toml"
    file.write_text("disagg_role = 'encoder'\ndisagg_server_addr = 'tcp://h:1'\nslots = 3\n[default]\nfps = 8")
    monkeypatch.setenv("TRIPTYCH_SCHEDULER_PORT", "19000")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("MOONCAKE_DEVICE_NAME", "mlx5_1")
    found = show(capsys, "tiny", "--config", str(file), "--slots", "4", "--default", "num_frames=17")
    assert found["model_path"] == ["tiny", "--model-path"]
    assert found["slots"] == ["4", "--slots"]
    assert found["scheduler_port"] == ["19000", "TRIPTYCH_SCHEDULER_PORT"]
    assert found["disagg_server_addr"] == ["tcp://h:1", str(file)]
    assert found["dtype"] == ["-", "default"]
    assert found["default"] == ["fps=8,", "num_frames=17", f"{file},", "--default"]
    assert found["mooncake"][:3] == ["rdma", "on", "mlx5_1,"]
    assert found["mooncake"][-2:] == ["MOONCAKE_PROTOCOL,", "MOONCAKE_DEVICE_NAME"]
    assert "port" not in found, "an instance has no HTTP port"


def test_keys_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, "--disagg-role", "server", "--api-key", "a-secret-key")
    assert found["api_key"] == ["(said)", "--api-key"]


def test_passwords_of_stores_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, "--disagg-role", "server", "--media-store", "sftp://bob:s3cret@host/clips")
    assert found["media_store"] == ["sftp://***@host/clips", "--media-store"]


def test_a_file_of_another_system_is_shown_with_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "role.json"
    file.write_text(json.dumps({"disagg_mode": "decode", "disagg_config": {"bootstrap_addr": "h"}, "vae_z_dim": 16}))
    found = show(capsys, "tiny", "--config", str(file))
    assert found["disagg_role"] == ["decoder", str(file)]
    assert "vae_z_dim:" in found["note:"]


def test_what_could_not_be_started_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--disagg-role", "server", "--slots", "3"]) == 2
    assert "--slots does not apply" in capsys.readouterr().err
