"""What all settings have in common: their checks, each with an error that names the option, and addresses."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from triptych.errors import ConfigError

MIB = 1 << 20

METRICS_OFFSET = 10_000
"""From a task port to the port of its metrics."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def positive(owner: object, *names: str) -> None:
    """Raises `ConfigError` for the first of these fields that is not greater than 0."""
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ConfigError(f"{name}={value!r}: must be greater than 0")


def check_port(name: str, value: int) -> None:
    """Raises `ConfigError` for what is no port."""
    if not 0 < value < 65536:
        raise ConfigError(f"{name}={value}: must be a port, 1 to 65535")


def check_reach(flag: str, host: str, key_dir: Path | None, insecure: bool) -> None:
    """Raises `ConfigError` for an address beyond loopback without keys, unless that was accepted."""
    if host not in LOOPBACK and key_dir is None and not insecure:
        raise ConfigError(
            f"{flag}={host!r} binds beyond loopback without authentication; make keys with `triptych keygen DIR` and "
            "pass --disagg-key-dir DIR, or pass --insecure to accept that"
        )


def check_host(flag: str, host: str) -> None:
    """Raises `ConfigError` for what can be no host: one with a port, or half an IPv6 address."""
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
    except ValueError:
        raise ConfigError(f"{flag}={host!r}: must be a host without a port, by name or address") from None


def host_port(host: str, port: int) -> str:
    """``host:port`` as URLs have it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tcp_url(host: str, port: int) -> str:
    """``tcp://host:port``, which `parse_tcp_url` reads."""
    return f"tcp://{host_port(host, port)}"


def parse_tcp_url(name: str, url: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``, an IPv6 address without its brackets; raises `ConfigError` that names the
    flag."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:  # a port that is no number, half an IPv6 address
        scheme, host, port = "", None, None
    if scheme != "tcp" or not host or port is None:
        raise ConfigError(f"{name}={url!r}: must look like tcp://host:port")
    check_port(name, port)
    return host, port
