"""A server for each test, which starts without instances."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.house import House


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """The server and what belongs to it; everything is stopped afterwards."""
    house = House(tmp_path / "outputs")
    await house.open()
    yield house
    await house.close()
