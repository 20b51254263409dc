"""What other users of the machine can read of a server: nothing that it keeps of prompts and pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.house import House


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): oct(path.stat().st_mode & 0o777) for path in folder.rglob("*")}


async def accepted(tmp_path: Path) -> dict[str, str]:
    """What lies in the state folder while a request with a picture waits."""
    house = House(tmp_path / "outputs")
    await house.open(state_dir=tmp_path / "state")
    try:
        house.add()
        await house.ready()
        await house.service.submit({"prompt": "a cat", "image": {"blob": 0}}, output="video", images=[b"picture"])
        return modes(tmp_path / "state")
    finally:
        await house.close()


async def test_state_and_media_are_the_servers_own(tmp_path: Path) -> None:
    found = await accepted(tmp_path)
    assert {name for name in found if "/" not in name} >= {"journal.sqlite3", "journal.sqlite3-wal", "lock", "images"}
    assert found.pop("images") == "0o700"
    assert set(found.values()) == {"0o600"}
    for folder in ("state", "outputs"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


async def test_a_folder_of_the_operators_keeps_its_rights_and_what_is_ours_in_it_is_closed(tmp_path: Path) -> None:
    for folder in ("state", "outputs"):
        (tmp_path / folder).mkdir(mode=0o755)
    (tmp_path / "state" / "images").mkdir(mode=0o755)
    (tmp_path / "state" / "lock").touch()
    found = await accepted(tmp_path)
    assert found.pop("images") == "0o700"
    assert set(found.values()) == {"0o600"}
    for folder in ("state", "outputs"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o755
