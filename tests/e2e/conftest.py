"""Deployments that several tests share, because starting processes is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.e2e.harness import Deployment, Process
from tests.ports import free_task_ports


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two encoders, three denoisers, two decoders; tensors through shared memory, tasks in three posts too."""
    with Deployment(tmp_path_factory.mktemp("pool"), task_ports=free_task_ports()) as deployment:
        yield deployment.start_all(encoder=2, denoiser=3, decoder=2)


class Spawn(Protocol):
    """Starts a `triptych` process."""

    def __call__(self, name: str, *words: str, forked: bool = False) -> Process: ...


@pytest.fixture
def spawn(folder: Path) -> Iterator[Spawn]:
    """Start processes that the test stops itself; what it left is killed."""
    started: list[Process] = []

    def start(name: str, *words: str, forked: bool = False) -> Process:
        started.append(Process(name, words, folder, forked=forked))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the test's own."""
    return tmp_path
