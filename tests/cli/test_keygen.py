"""`triptych keygen`, and what the other commands say of a key folder that is not in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.cli.main import main
from triptych.errors import ConfigError
from triptych.launch.args import ServerArgs
from triptych.transport.control.keys import load_keys


def test_keys_are_made_and_it_is_said_which_machine_needs_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["keygen", str(folder)]) == 0
    said = capsys.readouterr().out
    for name in ("server.public", "server.secret", "instance.public", "instance.secret"):
        assert str(folder / name) in said
    assert f"--disagg-key-dir {folder}" in said
    assert load_keys(folder, "server").peer == load_keys(folder, "instance").public


def test_keys_are_not_made_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path)]) == 0
    assert main(["keygen", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_keys_allow_what_needs_insecure_without_them() -> None:
    said = {"disagg_role": "encoder", "model_path": "tiny", "disagg_server_addr": "tcp://10.0.0.1:5555"}
    args = ServerArgs.from_kwargs(**said, disagg_p2p_hostname="10.0.0.2", disagg_key_dir="keys", device="cpu")
    config = args.instance_config(default_device="cpu")
    assert (config.key_dir, config.insecure) == (Path("keys"), False)
    said = {"disagg_role": "server", "host": "10.0.0.1", "disagg_key_dir": Path("keys")}
    server = ServerArgs.from_kwargs(**said, api_key="the-key-of-the-door").server_config()
    assert (server.key_dir, server.insecure) == (Path("keys"), False)


def test_keys_of_the_control_plane_open_no_http_door() -> None:
    said = {"disagg_role": "server", "host": "10.0.0.1", "disagg_key_dir": Path("keys")}
    with pytest.raises(ConfigError, match="opens the HTTP API beyond loopback"):
        ServerArgs.from_kwargs(**said).server_config()
    assert ServerArgs.from_kwargs(**said, insecure=True).server_config().key_dir == Path("keys")
    with pytest.raises(ConfigError, match="disagg-key-dir"):
        ServerArgs.from_kwargs(disagg_role="server", host="10.0.0.1", api_key="the-key-of-the-door").server_config()
