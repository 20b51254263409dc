"""What the Mooncake Transfer Engine is to use: from flags, the environment and Mooncake's JSON file, in this order.

The engine itself reads none of the ``MOONCAKE_*`` variables, and takes whatever it finds for what it was asked for. So
they are read here, and what cannot be honoured is an error that names the value and where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from triptych.config import TransferConfig
from triptych.config.checks import check_host
from triptych.errors import ConfigError

Transport: TypeAlias = Literal["tcp", "rdma"]

FILE_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
_KEYS: Final = ("local_hostname", "metadata_server", "protocol", "device_name")
VARIABLES: Final[Mapping[str, str]] = {key: f"MOONCAKE_{key.upper()}" for key in _KEYS}
"""Key of the file to the variable that wins over it."""
_METADATA: Final = "P2PHANDSHAKE"
_DEFAULT_HOSTNAME: Final = TransferConfig().hostname


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How the engine of this process is to be started."""

    hostname: str
    """Address under which peers reach it."""
    transport: Transport
    devices: str | None
    """RDMA adapters, with commas between; None with RDMA: every one that there is."""
    dma_buf: bool = False
    """Have adapters reach GPU memory as DMA-BUF, which all GPUs must export, and not by the module nvidia_peermem."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A value and what said it, the way that the operator knows it."""

    value: str
    by: str
    strength: int


def engine_settings(config: TransferConfig, environment: Mapping[str, str]) -> EngineSettings:
    """The settings that ``config`` (flags), ``MOONCAKE_*`` variables and the file at ``MOONCAKE_CONFIG_PATH`` give.

    A ``--disagg-p2p-hostname`` other than the default wins over a local hostname, and ``--disagg-ib-device`` over
    protocol and device name. Raises `ConfigError` for a value that cannot be honoured.
    """
    said = _from_file(environment.get(FILE_VARIABLE, ""))
    for key, variable in VARIABLES.items():
        if environment.get(variable):
            said[key] = _Said(environment[variable], variable, 1)
    _check_metadata(said.get("metadata_server"))
    hostname = _hostname(said.get("local_hostname"))
    transport, devices = _transport(said.get("protocol"), said.get("device_name"))
    if config.ib_device is not None:
        transport, devices = "rdma", config.ib_device
    if config.hostname != _DEFAULT_HOSTNAME or hostname is None:
        hostname = config.hostname
    return EngineSettings(hostname=hostname, transport=transport, devices=devices)


def _from_file(path: str) -> dict[str, _Said]:
    if not path:
        return {}
    where = f"{FILE_VARIABLE}={path!r}"
    try:
        loaded: object = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: is no JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where}: must be a JSON object with the keys {', '.join(_KEYS)}")
    said: dict[str, _Said] = {}
    for key, value in cast("dict[str, object]", loaded).items():
        if key not in _KEYS:
            raise ConfigError(f"{where}: {key} is not used here; accepted are {', '.join(_KEYS)}")
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key}={value!r}: must be a text")
        if value:
            said[key] = _Said(value, f"{key} in {path}", 0)
    return said


def _check_metadata(said: _Said | None) -> None:
    if said is not None and said.value != _METADATA:
        raise ConfigError(
            f"{said.by}={said.value!r}: must be {_METADATA}; instances learn of each other from the DiffusionServer"
        )


def _hostname(said: _Said | None) -> str | None:
    if said is None:
        return None
    try:
        check_host(said.by, said.value)
    except ConfigError as error:
        own = "Mooncake takes free ports of its own (MC_MIN_RPC_PORT, MC_MAX_RPC_PORT)"
        raise ConfigError(f"{error.message}; {own}") from None
    return said.value


def _transport(protocol: _Said | None, devices: _Said | None) -> tuple[Transport, str | None]:
    if protocol is None:
        return ("tcp", None) if devices is None else ("rdma", devices.value)
    match protocol.value:
        case "rdma":
            return "rdma", None if devices is None else devices.value
        case "tcp":
            # A variable that says tcp overrides a file that says rdma, and then the file's device goes with it.
            if devices is not None and devices.strength >= protocol.strength:
                raise ConfigError(f"{devices.by}={devices.value!r} needs rdma, but {protocol.by} says tcp")
            return "tcp", None
        case _:
            raise ConfigError(f"{protocol.by}={protocol.value!r}: must be tcp or rdma")
