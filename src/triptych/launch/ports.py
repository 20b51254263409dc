"""Free TCP ports for processes that a group starts, and sockets for ports that were asked for."""

from __future__ import annotations

import errno
import socket

from triptych.errors import ConfigError

_handed_out: dict[int, None] = {}
"""Ports by age, the oldest first."""
LOWEST, HIGHEST = 17100, 19000
"""Above 15000 to 17000, where Mooncake takes its own, below what people choose after our examples, and far enough below
the ephemeral ports of Linux, which begin at 32768, for those of the metrics too, `METRICS_OFFSET` above: where an
outgoing connection has a port, nobody can listen until it ends, and for a minute more."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` neighbouring ports that nothing listens on. None that this process was given lately: whoever was may
    not listen yet.

    Raises `ConfigError` when there is no such run of ports.
    """
    while (ports := _find(count, host)) is None:
        if not _handed_out:
            raise ConfigError(f"no {count} neighbouring free ports between {LOWEST} and {HIGHEST} on {host}")
        for port in list(_handed_out)[: len(_handed_out) // 2 + 1]:
            del _handed_out[port]
    _handed_out.update(dict.fromkeys(ports))
    return ports


def _find(count: int, host: str) -> list[int] | None:
    """Such ports that were not handed out, if there are any."""
    # Start from a port that the kernel picks, so that two groups that start at once search in different places.
    with socket.socket() as probe:
        probe.bind((host, 0))
        offset = probe.getsockname()[1]
    span = HIGHEST - LOWEST - count
    for step in range(0, span, count):
        first = LOWEST + (offset * 7 + step) % span
        ports = list(range(first, first + count))
        if _handed_out.keys().isdisjoint(ports) and all(is_free(port, host) for port in ports):
            return ports
    return None


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a listener could bind this port now."""
    try:
        listen(host, port, "port").close()
    except ConfigError:
        return False
    return True


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening TCP socket. Raises `ConfigError` that names the flag and the port when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)  # two sockets that reuse addresses may both bind; only one may listen
    except OSError as error:
        sock.close()
        why = "is in use by another process" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error}"
        raise ConfigError(f"{flag} {port} on {host} {why}") from error
    return sock
