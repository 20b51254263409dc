"""Uploaded images on disk: whole or not at all, and swept away when no job needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.errors import StorageFailed, StorageFull
from triptych.ids import RequestId
from triptych.server.uploads import Uploads

JOB, OTHER = RequestId("video_1"), RequestId("video_2")


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    uploads = Uploads(tmp_path)
    uploads.open()
    return uploads


def test_images_come_back_as_they_were(uploads: Uploads) -> None:
    uploads.save(JOB, [b"one", b"", b"three" * 1000])
    assert uploads.load(JOB) == (b"one", b"", b"three" * 1000)
    uploads.remove(JOB)
    uploads.remove(JOB)
    with pytest.raises(StorageFailed, match="video_1"):
        uploads.load(JOB)


def test_a_full_disk_is_told_apart_and_leaves_nothing(uploads: Uploads, tmp_path: Path) -> None:
    (tmp_path / f"{JOB}.part").symlink_to("/dev/full")
    with pytest.raises(StorageFull, match="no room for uploaded images") as caught:
        uploads.save(JOB, [b"picture"])
    assert caught.value.status == 507
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_to_no_live_job_is_swept_away(uploads: Uploads, tmp_path: Path) -> None:
    uploads.save(JOB, [b"kept"])
    uploads.save(OTHER, [b"left behind"])
    (tmp_path / f"{JOB}.part").write_bytes(b"hal")
    uploads.sweep({JOB})
    assert [path.name for path in tmp_path.iterdir()] == [f"{JOB}.images"]


def test_damaged_images_are_an_error_that_names_the_file(uploads: Uploads, tmp_path: Path) -> None:
    uploads.save(JOB, [b"picture"])
    (tmp_path / f"{JOB}.images").write_bytes(b"\xc1")
    with pytest.raises(StorageFailed, match=f"{JOB}"):
        uploads.load(JOB)
