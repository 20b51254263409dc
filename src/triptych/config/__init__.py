"""Settings of each component: frozen, keyword-only, validated when built, each field documented under it.

Construction never probes hardware. What is derived is a property. A module takes the few values that it needs.
"""

from __future__ import annotations

from triptych.config.checks import LOOPBACK, METRICS_OFFSET, MIB, host_port, parse_tcp_url, tcp_url
from triptych.config.instance import InstanceConfig, TransferConfig, TransferKind
from triptych.config.model import (
    CFG,
    DeviceType,
    DTypeName,
    Lora,
    ModelConfig,
    Offload,
    Profile,
    ProfileChoice,
    Quantisation,
    Shape,
    Task,
    parse_shape,
)
from triptych.config.server import KEY_PREFIX, DispatchPolicy, RouterConfig, ServerConfig

__all__ = [
    "CFG",
    "KEY_PREFIX",
    "LOOPBACK",
    "METRICS_OFFSET",
    "MIB",
    "DTypeName",
    "DeviceType",
    "DispatchPolicy",
    "InstanceConfig",
    "Lora",
    "ModelConfig",
    "Offload",
    "Profile",
    "ProfileChoice",
    "Quantisation",
    "RouterConfig",
    "ServerConfig",
    "Shape",
    "Task",
    "TransferConfig",
    "TransferKind",
    "host_port",
    "parse_shape",
    "parse_tcp_url",
    "tcp_url",
]
