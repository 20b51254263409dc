"""Ports for tests that open a server's task ports."""

from __future__ import annotations

from triptych.config import METRICS_OFFSET
from triptych.launch.ports import free_ports, is_free


def free_task_ports() -> tuple[int, int, int]:
    """Three ports that are free, as are those of their metrics."""
    while True:
        encoder, transformer, decoder = free_ports(3)
        if all(is_free(port + METRICS_OFFSET) for port in (encoder, transformer, decoder)):
            return encoder, transformer, decoder
