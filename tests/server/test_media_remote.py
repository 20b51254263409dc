"""Media in a remote store: whole files or none, the latest ones on local disk, and a server that uses one."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec
import httpx
import pytest
from moto.server import ThreadedMotoServer

from tests import asking
from tests.api.conftest import CLIP, schema
from tests.api.conftest import House as Door
from tests.server.house import House, until
from tests.server.test_media_store import media
from triptych.client import Client
from triptych.core.events import JobState
from triptych.errors import ConfigError, StorageFailed
from triptych.server import keeper
from triptych.server.media_remote import RemoteMedia
from triptych.server.records import IdMint


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server of this process; gives its address."""
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh place in S3."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    return f"s3://bucket-{uuid.uuid4().hex}/clips"


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """A fresh place in a store."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return request.getfixturevalue("s3_url")


@pytest.fixture
def store(url: str, tmp_path: Path) -> RemoteMedia:
    store = RemoteMedia(url, tmp_path / "cache", cache_bytes=20)
    store.open()
    return store


def remote(url: str) -> set[str]:
    """Names of what lies in the store."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return {Path(name).name for name in system.ls(root, detail=False)} if system.exists(root) else set()


def cached(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir()}


def test_files_are_stored_remotely_served_locally_and_removed_everywhere(
    store: RemoteMedia, url: str, tmp_path: Path
) -> None:
    files = store.store(IdMint()("video"), [media(b"a", ".png"), media(b"bb", ".png")])
    names = {file.name for file in files}
    assert remote(url) == cached(tmp_path) == names
    assert [file.fetch().read_bytes() for file in files] == [b"a", b"bb"]
    store.remove(files)
    store.remove(files)
    assert remote(url) == cached(tmp_path) == set()
    with pytest.raises(FileNotFoundError):
        files[0].fetch()


def test_local_copies_are_bounded_and_come_back_when_asked_for(store: RemoteMedia, url: str, tmp_path: Path) -> None:
    mint = IdMint()
    films = [store.store(mint("video"), [media(b"%d" % i * 8)])[0] for i in range(4)]
    assert cached(tmp_path) == {films[2].name, films[3].name}
    assert len(remote(url)) == 4
    assert films[0].fetch().read_bytes() == b"0" * 8
    assert cached(tmp_path) == {films[0].name, films[3].name}


def test_local_copies_of_an_earlier_life_are_bounded_too(store: RemoteMedia, url: str, tmp_path: Path) -> None:
    """Symptom: after each restart another gigabyte of other servers' files stayed on the disk."""
    mint = IdMint()
    films = [store.store(mint("video"), [media(b"%d" % i * 8)])[0] for i in range(3)]
    saved = tmp_path / "other" / "kept.mp4"
    for _ in range(2):
        other = RemoteMedia(url, tmp_path / "other", cache_bytes=20)
        other.open()
        saved.write_bytes(b"what a client asked for" * 10)
        for film in films:
            other.fetch(film.name)
            found = {path.name for path in (tmp_path / "other").iterdir()}
            assert film.name in found
            assert len(found) <= 3
    assert saved.exists()


def test_another_server_with_an_empty_disk_serves_what_is_there(store: RemoteMedia, url: str, tmp_path: Path) -> None:
    (film,) = store.store(IdMint()("video"), [media(b"film")])
    other = RemoteMedia(url, tmp_path / "other")
    other.open()
    placed = other.place(film)
    assert placed.path.parent == tmp_path / "other"
    assert placed.fetch().read_bytes() == b"film"


def test_an_upload_that_is_cut_short_leaves_nothing_anywhere(
    store: RemoteMedia, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = store._system
    original = system.put_file

    def short(local: str, name: str, **options: object) -> None:
        original(local, name, **options)
        if name.endswith("-1.png"):
            system.pipe_file(name, b"hal")

    monkeypatch.setattr(system, "put_file", short)
    with pytest.raises(StorageFailed, match="has 3 bytes after 4 were written"):
        store.store(IdMint()("image"), [media(b"one", ".png"), media(b"half", ".png")])
    assert remote(url) == cached(tmp_path) == set()


def test_a_store_that_cannot_be_reached_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--media-store nonsense://x: .*triptych\[s3\]"):
        RemoteMedia("nonsense://x", tmp_path).open()
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(StorageFailed, match=r"the media store cannot be written: .*file/deeper"):
        RemoteMedia(f"file://{blocked}/deeper", tmp_path / "cache").open()


async def test_a_server_keeps_its_media_there_and_a_restarted_one_finds_them(url: str, tmp_path: Path) -> None:
    house = House(tmp_path / "outputs")
    settings = {"media_store": url, "state_dir": tmp_path / "state"}
    await house.open(**settings)
    try:
        house.add()
        await house.ready()
        record = await house.run()
        assert record.view.state is JobState.DONE
        await house.service.close()
        record.files[0].path.unlink()
        await house.open(**settings)
        (file,) = house.service.get(record.id).files
        assert file.fetch().read_bytes() == b"film"
        await house.service.delete(record.id)
        assert remote(url) == set()
        await until(lambda: not list((tmp_path / "outputs").iterdir()), "the local copy being removed")
    finally:
        await house.close()


def test_servers_that_share_a_store_give_each_others_files_by_name(s3_url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        here, there = (Door(tmp_path / name, schema(with_count=True), media_store=s3_url) for name in ("here", "there"))
        for door in (here, there):
            door.open()
            stack.callback(door.close)
        client = stack.enter_context(Client(here.url))
        job = client.create("a cat").id
        client.wait(job, timeout=60)
        name = f"{job}.mp4"

        def get(house: Door, name: str, **headers: str) -> httpx.Response:
            return asking.get(f"{house.url}/v1/files/{name}", headers=headers)

        for door in (here, there):
            answer = get(door, name)
            assert (answer.content, answer.headers["content-type"]) == (CLIP, "video/mp4")
            assert get(door, name, range="bytes=1-3").content == CLIP[1:4]
        assert get(there, f"video_{'0' * 32}.mp4").status_code == 404
        assert asking.get(f"{there.url}/v1/videos/{job}").status_code == 404
        client.delete(job)
        assert [get(door, name).status_code for door in (here, there)] == [404, 404]
        assert not list((tmp_path / "there").glob("*.mp4"))


async def test_a_deleted_job_is_gone_though_the_store_has_its_file_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_url: str
) -> None:
    house = House(tmp_path / "outputs")
    await house.open(media_store=s3_url)
    try:
        house.add()
        await house.ready()
        record = await house.run()
        (file,) = record.files

        def down(self: RemoteMedia, name: str) -> None:
            raise StorageFailed("the store is down")

        monkeypatch.setattr(RemoteMedia, "_delete", down)
        await house.service.delete(record.id)
        assert remote(s3_url) == {file.name}
        assert await house.service.shared_file(record.id, file.name) is None
    finally:
        await house.close()


def test_neither_clients_nor_logs_are_told_the_stores_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: whoever fetched a film while the store was down got user, password and host of the store."""
    url = f"memory://bob:s3cret%21@{uuid.uuid4().hex}/clips"
    house = Door(tmp_path / "here", schema(with_count=True), media_store=url)

    def down(*_: object, **__: object) -> None:
        raise OSError(f"bob with 's3cret!' cannot reach {url}")

    house.open()
    try:
        with Client(house.url) as client:
            film = client.wait(client.create("a cat").id, timeout=60).id
        (path,) = (tmp_path / "here").glob("*.mp4")
        path.unlink()
        monkeypatch.setattr(house.service._keeper._media._system, "get_file", down)
        answer = asking.get(f"{house.url}/v1/videos/{film}/content")
    finally:
        house.close()
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the media store cannot be read"
    assert "memory://***@" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_store_that_hangs_stops_who_asks_for_its_files_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: forty downloads while the store was away, and no request was read for minutes."""
    url = f"memory://{uuid.uuid4().hex}"
    house = Door(tmp_path / "here", schema(with_count=True), media_store=url)
    back = threading.Event()
    asked: list[str] = []

    def hang(remote: str, local: str) -> None:
        asked.append(remote)
        back.wait(60)
        Path(local).write_bytes(CLIP)

    house.open()
    try:
        with Client(house.url) as client:
            far, near = (client.wait(client.create("a cat").id, timeout=60).id for _ in range(2))
        (tmp_path / "here" / f"{far}.mp4").unlink()
        monkeypatch.setattr(house.service._keeper._media._system, "get_file", hang)
        with ExitStack() as wires:
            kinds = ("", "?variant=thumbnail")
            lines = [wires.enter_context(socket.create_connection(("127.0.0.1", house.config.port))) for _ in range(60)]
            for number, line in enumerate(lines):
                path = f"/v1/videos/{far}/content{kinds[number % 2]}"
                line.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            deadline = time.monotonic() + 60
            while len(asked) < keeper.READ_THREADS:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            began = asking.post(f"{house.url}/v1/videos", json={"prompt": "a dog", "size": "96x64"})
            assert began.status_code == 200
            with Client(house.url) as client:
                client.wait(began.json()["id"], timeout=60)
            assert asking.get(f"{house.url}/v1/videos/{near}/content").content == CLIP
            assert not back.is_set()
            back.set()
            assert lines[0].makefile("rb").read().endswith(CLIP)
    finally:
        back.set()
        house.close()
