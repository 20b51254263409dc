"""The order in which the server and its instances come up does not matter: each finds the others."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.server.house import House
from triptych.core.events import JobState
from triptych.ids import ROLES, Role

SERVER = "server"
HEAD_START = 0.1
"""Seconds that whoever starts earlier stands alone, so that it really calls for peers that are not there yet."""


@pytest.mark.parametrize("order", tuple(itertools.permutations((SERVER, *ROLES))), ids="-".join)
async def test_every_start_order_serves(tmp_path: Path, order: tuple[str | Role, ...]) -> None:
    house = House(tmp_path)
    ports = {role: house.port + 5 + place for place, role in enumerate(ROLES)}
    urls = {role: (f"tcp://127.0.0.1:{port}",) for role, port in ports.items()}
    try:
        for who in order:
            if isinstance(who, Role):
                house.add(who, port=ports[who])
            else:
                await house.open(instance_urls=urls)
            await asyncio.sleep(HEAD_START)
        await house.ready()
        assert (await house.run()).view.state is JobState.DONE
    finally:
        await house.close()
