"""What the keeper says of its stores while they are at work."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tests.server.house import until
from tests.server.test_media_store import media
from triptych.config import ServerConfig
from triptych.server import keeper
from triptych.server.keeper import STORE_THREADS, Keeper
from triptych.server.media_store import LocalMedia
from triptych.server.records import IdMint


async def test_files_that_take_long_to_store_are_no_failure_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: /ready said that files could not be stored while large ones were being uploaded."""
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.0)
    writing, go_on, write = threading.Semaphore(0), threading.Event(), LocalMedia._write

    def slow(path: Path, data: bytes) -> None:
        writing.release()
        assert go_on.wait(60)
        write(path, data)

    kept, mint = Keeper(ServerConfig(output_dir=tmp_path)), IdMint()
    await kept.open()
    monkeypatch.setattr(LocalMedia, "_write", staticmethod(slow))
    stores = [asyncio.create_task(kept.store(mint("video"), [media(b"film")])) for _ in range(STORE_THREADS)]
    for _ in stores:
        assert await asyncio.to_thread(writing.acquire, timeout=60)
    kept.look()
    await kept.rest(30)
    assert kept.state().media == ""
    go_on.set()
    await asyncio.gather(*stores)
    await kept.close(60)


async def test_a_store_that_does_not_say_how_it_is_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.0)
    go_on = threading.Event()
    monkeypatch.setattr(LocalMedia, "look", lambda _: go_on.wait(60))
    kept = Keeper(ServerConfig(output_dir=tmp_path))
    await kept.open()
    kept.look()
    await until(lambda: kept.state().media.startswith("no answer for"), "the silence to be told")
    go_on.set()
    await until(lambda: kept.state().media == "", "the answer to be told")
    await kept.close(60)
