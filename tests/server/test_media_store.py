"""The media store: whole files or none, under its own folder only, and honest about a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import xxhash

from triptych.errors import StorageFailed, StorageFull
from triptych.ids import RequestId
from triptych.server.media_store import LocalMedia
from triptych.server.records import IdMint
from triptych.wire.messages import MediaFile


def media(data: bytes, suffix: str = ".mp4") -> tuple[MediaFile, bytes]:
    described = MediaFile(
        blob=0,
        mime="video/mp4",
        suffix=suffix,
        width=64,
        height=32,
        frames=9,
        fps=8.0,
        checksum=xxhash.xxh3_64_intdigest(data),
    )
    return described, data


@pytest.fixture
def store(tmp_path: Path) -> LocalMedia:
    store = LocalMedia(tmp_path / "deep" / "outputs")
    store.open()
    return store


@pytest.fixture
def request_id() -> RequestId:
    return IdMint()("video")


def names(store: LocalMedia) -> list[str]:
    return sorted(p.name for p in store.root.iterdir())


def test_one_file_is_named_by_the_job(store: LocalMedia, request_id: RequestId) -> None:
    (file,) = store.store(request_id, [media(b"film")])
    assert file.path.read_bytes() == b"film"
    assert file.name == f"{request_id}.mp4"
    assert (file.nbytes, file.width, file.height, file.frames, file.fps) == (4, 64, 32, 9, 8.0)
    assert names(store) == [file.name]


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with an output folder on a read-only mount every job was computed, and then failed."""

    def read_only(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as disk:
        disk.setattr(LocalMedia, "_write", staticmethod(read_only))
        with pytest.raises(StorageFailed, match=r"output folder cannot be used: .*Read-only"):
            LocalMedia(tmp_path).open()

    def full(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalMedia, "_write", staticmethod(full))
    LocalMedia(tmp_path).open()  # there may be room by the time that a file is made
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_made_again(store: LocalMedia, request_id: RequestId) -> None:
    store.root.rmdir()
    with pytest.raises(StorageFailed, match="cannot be written"):
        store.store(request_id, [media(b"film")])
    store.root.parent.rmdir()
    store.root.parent.touch()
    with pytest.raises(StorageFailed, match="output folder cannot be written"):
        store.look()
    store.root.parent.unlink()
    store.look()
    assert names(store) == []
    (file,) = store.store(request_id, [media(b"film")])
    assert file.path.read_bytes() == b"film"


def test_several_files_are_numbered_and_removed_together(store: LocalMedia, request_id: RequestId) -> None:
    files = store.store(request_id, [media(b"a", ".png"), media(b"b", ".png")])
    assert [f.name for f in files] == [f"{request_id}-0.png", f"{request_id}-1.png"]
    store.remove(files)
    assert names(store) == []
    store.remove(files)


@pytest.mark.parametrize("suffix", ["/../../x", ".mp4/", "mp4", ".", "", ".MP4", ".a b", ".toolongsuffix"])
def test_a_suffix_that_is_none_writes_nothing(store: LocalMedia, request_id: RequestId, suffix: str) -> None:
    with pytest.raises(StorageFailed, match="suffix"):
        store.store(request_id, [media(b"a", suffix)])
    assert names(store) == []


def test_an_id_that_was_not_minted_is_never_a_path(store: LocalMedia) -> None:
    with pytest.raises(StorageFailed, match="not a job id"):
        store.store(RequestId("../../etc/passwd"), [media(b"a")])


def test_damaged_bytes_leave_no_file_of_the_job(store: LocalMedia, request_id: RequestId) -> None:
    described, _ = media(b"original")
    with pytest.raises(StorageFailed, match="checksums differ"):
        store.store(request_id, [media(b"good"), (described, b"damaged!")])
    assert names(store) == []


def test_half_written_files_of_a_killed_server_are_cleared(store: LocalMedia, request_id: RequestId) -> None:
    (kept,) = store.store(request_id, [media(b"film")])
    (store.root / f".{request_id}-9.mp4.part").write_bytes(b"hal")
    LocalMedia(store.root).open()
    assert names(store) == [kept.name]


def test_a_full_disk_is_told_apart_and_recovers(
    store: LocalMedia, request_id: RequestId, monkeypatch: pytest.MonkeyPatch
) -> None:
    (earlier,) = store.store(request_id, [media(b"earlier")])
    full = True
    real_write = LocalMedia._write

    def write(path: Path, data: bytes) -> None:
        real_write(path, data[:2] if full else data)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalMedia, "_write", staticmethod(write))
    with pytest.raises(StorageFull, match=r"\(5 bytes\)") as caught:
        store.store(IdMint()("video"), [media(b"later")])
    assert str(store.root) in str(caught.value)
    assert str(store.root) not in caught.value.message
    assert caught.value.status == 507
    assert names(store) == [earlier.name]
    assert earlier.path.read_bytes() == b"earlier"
    store.check_room()
    full = False
    store.store(IdMint()("video"), [media(b"later")])
    assert len(names(store)) == 2


def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageFailed, match="file/outputs") as caught:
        LocalMedia(tmp_path / "file" / "outputs").open()
    assert str(tmp_path) not in caught.value.message, "which clients may see"
