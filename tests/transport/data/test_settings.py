"""Flags, ``MOONCAKE_*`` variables and Mooncake's file: who wins, and what cannot be honoured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.config import TransferConfig
from triptych.errors import ConfigError
from triptych.transport.data.settings import EngineSettings, engine_settings


def settings(environment: dict[str, str] | None = None, **flags: Any) -> EngineSettings:
    return engine_settings(TransferConfig(**flags), environment or {})


def file(folder: Path, content: object) -> dict[str, str]:
    path = folder / "mooncake.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {"MOONCAKE_CONFIG_PATH": str(path)}


RDMA = {
    "local_hostname": "10.0.0.7",
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "rdma",
    "device_name": "mlx5_0",
}


def test_without_a_word_it_is_tcp_on_the_p2p_hostname() -> None:
    assert settings() == EngineSettings(hostname="127.0.0.1", transport="tcp", devices=None)
    assert settings(hostname="10.0.0.9").hostname == "10.0.0.9"


def test_the_file_is_honoured(tmp_path: Path) -> None:
    assert settings(file(tmp_path, RDMA)) == EngineSettings(hostname="10.0.0.7", transport="rdma", devices="mlx5_0")
    assert settings(file(tmp_path, {})) == settings()
    assert settings(file(tmp_path, {**RDMA, "protocol": "tcp", "device_name": ""})).transport == "tcp"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MOONCAKE_LOCAL_HOSTNAME": "10.0.0.8"}, ("10.0.0.8", "rdma", "mlx5_0")),
        ({"MOONCAKE_DEVICE_NAME": "mlx5_1,mlx5_2"}, ("10.0.0.7", "rdma", "mlx5_1,mlx5_2")),
        ({"MOONCAKE_PROTOCOL": "tcp"}, ("10.0.0.7", "tcp", None)),
        ({"MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE", "MOONCAKE_PROTOCOL": ""}, ("10.0.0.7", "rdma", "mlx5_0")),
    ],
)
def test_a_variable_wins_over_the_file(
    tmp_path: Path, variables: dict[str, str], expected: tuple[str, str, str | None]
) -> None:
    got = settings(file(tmp_path, RDMA) | variables)
    assert (got.hostname, got.transport, got.devices) == expected


def test_flags_win_over_both(tmp_path: Path) -> None:
    variables = {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_LOCAL_HOSTNAME": "10.0.0.8"}
    got = settings(file(tmp_path, RDMA) | variables, hostname="10.0.0.9", ib_device="mlx5_7")
    assert got == EngineSettings(hostname="10.0.0.9", transport="rdma", devices="mlx5_7")


def test_rdma_without_a_device_means_every_adapter() -> None:
    assert settings({"MOONCAKE_PROTOCOL": "rdma"}) == EngineSettings(
        hostname="127.0.0.1", transport="rdma", devices=None
    )
    assert settings({"MOONCAKE_DEVICE_NAME": "mlx5_3"}).transport == "rdma"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"MOONCAKE_METADATA_SERVER": "etcd://h:2379"},
            "MOONCAKE_METADATA_SERVER='etcd://h:2379': must be P2PHANDSHAKE",
        ),
        ({"MOONCAKE_PROTOCOL": "efa"}, "MOONCAKE_PROTOCOL='efa': must be tcp or rdma"),
        ({"MOONCAKE_LOCAL_HOSTNAME": "h:12345"}, "MOONCAKE_LOCAL_HOSTNAME='h:12345': must be a host without a port"),
        (
            {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_DEVICE_NAME": "mlx5_0"},
            "MOONCAKE_DEVICE_NAME='mlx5_0' needs rdma, but MOONCAKE_PROTOCOL says tcp",
        ),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(variables)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**RDMA, "metadata_server": "http://h:8080/metadata"}, "metadata_server in "),
        ({**RDMA, "protocol": "tcp"}, "device_name in "),
        ({"master_server_address": "h:1"}, "master_server_address is not used here; accepted are local_hostname"),
        ({"protocol": 5}, "protocol=5: must be a text"),
        ([], "must be a JSON object"),
        ("{", "is no JSON"),
    ],
)
def test_a_file_that_cannot_be_honoured_is_named(tmp_path: Path, content: object, message: str) -> None:
    environment = file(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        settings(environment)
    assert message in caught.value.message
    assert environment["MOONCAKE_CONFIG_PATH"] in caught.value.message


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"MOONCAKE_CONFIG_PATH='/none/mooncake\.json': cannot be read: No such file"):
        settings({"MOONCAKE_CONFIG_PATH": "/none/mooncake.json"})
