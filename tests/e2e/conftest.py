"""Deployments that several tests share, because starting processes is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Deployment


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two encoders, three denoisers, two decoders; tensors through shared memory."""
    with Deployment(tmp_path_factory.mktemp("pool")) as deployment:
        yield deployment.start_all(encoder=2, denoiser=3, decoder=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the test's own."""
    return tmp_path
