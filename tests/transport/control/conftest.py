"""Real sockets on loopback, on ports that nobody else uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from triptych.errors import ConfigError
from triptych.launch.ports import free_ports
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.server import ServerControl

HOST = "127.0.0.1"


def _free_port() -> int:
    return free_ports(1)[0]  # none of those that outgoing connections get, of other tests' for instance


def _open_server() -> tuple[ServerControl, int]:
    for _ in range(50):
        port = free_ports(4)[0]
        try:
            return ServerControl(HOST, port), port
        except ConfigError:
            continue
    raise AssertionError("no four free ports in a row")


@pytest.fixture
def free_port() -> Callable[[], int]:
    return _free_port


@pytest.fixture
def server() -> Iterator[tuple[ServerControl, int]]:
    control, port = _open_server()
    yield control, port
    control.close()


@pytest.fixture
def join() -> Iterator[Callable[[int], tuple[InstanceControl, str]]]:
    """Start an instance's control that looks for its server on a port; gives its work url too."""
    opened: list[InstanceControl] = []

    def start(server_port: int, host: str = HOST) -> tuple[InstanceControl, str]:
        work_port = _free_port()
        control = InstanceControl(bind_host=HOST, work_port=work_port, server_addr=f"tcp://{host}:{server_port}")
        opened.append(control)
        return control, f"tcp://{HOST}:{work_port}"

    yield start
    for control in opened:
        control.close()
