"""In which order the test files run, and which of them one process runs, where several processes share the work."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from triptych.launch import ports

gc.disable()  # until all tests are collected: what is imported stays, and is much to look at for garbage

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")  # how long an example takes is the machine's matter


LOWEST_PORT, HIGHEST_PORT = 10100, 14900
"""Of those that tests choose: none that `triptych up` and its kind choose by themselves, none that Mooncake takes; and
those of the metrics are none that outgoing connections get."""


def _keep_to_own_ports() -> None:
    """Processes that share the tests also share out the ports, so that what starts again finds its port free."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    width = (HIGHEST_PORT - LOWEST_PORT) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports.LOWEST = LOWEST_PORT + number * width
    ports.HIGHEST = ports.LOWEST + width


_keep_to_own_ports()

LONGEST = (
    "tests/e2e/test_chaos.py",
    "tests/sim/test_sweep.py",
    "tests/e2e/",
    "tests/transport/data/",
    "tests/worker/",
    "tests/bench/",
    "tests/models/",
    "tests/api/",
)
"""Begun first, so that no process is left alone with one of them at the end."""

ONE_POOL = {f"tests/e2e/test_{name}.py" for name in ("commands", "faults", "identity", "load", "doors")}
"""Files whose tests share one deployment of eight processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file, longest first."""
    items.sort(key=lambda item: _rank(_file(item.nodeid)))


def pytest_collection_finish() -> None:
    """From here on there is garbage, but not in what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Files as wholes, and those of one pool together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = _file(nodeid)
            return "one pool" if file in ONE_POOL else file

    return Scheduling(config, log)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _rank(file: str) -> tuple[int, bool]:
    first = next((rank for rank, start in enumerate(LONGEST) if file.startswith(start)), len(LONGEST))
    return first, file not in ONE_POOL
