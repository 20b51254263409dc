"""Copies of other instances: kept if that can be, given up when nobody wants them, and in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import torch

from tests.worker.conftest import IDENTITY, MIB
from triptych.core.instance_events import CopyKept
from triptych.errors import TransferError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data import local
from triptych.transport.data.local import LocalPlane
from triptych.transport.data.protocol import Payload, Pull
from triptych.wire.manifest import Manifest
from triptych.worker.jobs import KeepJob, Post
from triptych.worker.keeping import KeepThread

WAIT = 60.0


@pytest.fixture
def keeper(plane: LocalPlane, posts: SimpleQueue[Post]) -> Iterator[KeepThread]:
    thread = KeepThread(plane=plane, device="cpu", post=posts.put)
    thread.start()
    yield thread
    thread.close()
    thread.join(WAIT)
    assert not thread.is_alive()


def staged(plane: LocalPlane) -> Manifest:
    return plane.stage(RequestId("r"), Payload(tree=b"", tensors=(torch.arange(9),)))


def test_a_copy_of_another_instance_is_kept_under_a_name_of_ones_own(
    plane: LocalPlane, keeper: KeepThread, posts: SimpleQueue[Post]
) -> None:
    other = LocalPlane(instance=InstanceId("other"), epoch=Epoch("other"), pool_bytes=MIB)
    theirs = other.stage(RequestId("r"), Payload(tree=b"tree", tensors=(torch.arange(9),)))
    keeper.put(KeepJob(manifest=theirs, spare=True))
    kept = posts.get(timeout=WAIT)
    assert isinstance(kept, CopyKept)
    assert (kept.copy, kept.manifest.producer, kept.manifest.request) == (theirs.copy, IDENTITY.instance, "r")
    other.close()
    assert [manifest.copy for manifest in plane.copies()] == [kept.manifest.copy]


def test_a_copy_that_is_gone_is_not_kept_and_the_thread_lives_on(
    plane: LocalPlane, keeper: KeepThread, posts: SimpleQueue[Post]
) -> None:
    gone, there = (plane.stage(RequestId("r"), Payload(tree=b"", tensors=(torch.arange(9),))) for _ in range(2))
    plane.release((gone.copy,))
    keeper.put(KeepJob(manifest=gone, spare=True))
    keeper.put(KeepJob(manifest=there, spare=False))
    kept = posts.get(timeout=WAIT)
    assert isinstance(kept, CopyKept)
    assert kept.copy == there.copy


def test_a_copy_for_which_there_is_no_memory_is_not_kept_and_takes_no_room(
    plane: LocalPlane, keeper: KeepThread, posts: SimpleQueue[Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = staged(plane)
    clone, tried = local._clone, threading.Event()

    def full(tensors: object) -> tuple[torch.Tensor, ...]:
        tried.set()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(local, "_clone", full)
    keeper.put(KeepJob(manifest=theirs, spare=True))
    assert tried.wait(WAIT)
    monkeypatch.setattr(local, "_clone", clone)
    keeper.put(KeepJob(manifest=theirs, spare=True))
    kept = posts.get(timeout=WAIT)
    assert isinstance(kept, CopyKept)
    assert {manifest.copy for manifest in plane.copies()} == {theirs.copy, kept.manifest.copy}


class Hung:
    """Pulls that end only when they are cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __call__(self, manifest: Manifest, *, deadline: float, cancelled: Callable[[], bool]) -> Pull:
        self.begun.set()
        while not cancelled():
            pass
        raise TransferError("the pull was cancelled")


def test_what_nobody_wants_any_more_is_given_up_while_it_is_pulled_and_before(
    plane: LocalPlane, keeper: KeepThread, posts: SimpleQueue[Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (staged(plane) for _ in range(3))
    hung = Hung()
    with monkeypatch.context() as patched:
        patched.setattr(plane, "pull", hung)
        for manifest in (first, second, third):
            keeper.put(KeepJob(manifest=manifest, spare=True))
        assert hung.begun.wait(WAIT)
    keeper.release([second.copy])
    keeper.release([first.copy])
    kept = posts.get(timeout=WAIT)
    assert isinstance(kept, CopyKept)
    assert kept.copy == third.copy
    assert len(plane.copies()) == 4
    assert not keeper._wanted


def test_what_has_become_needless_when_it_is_here_is_let_go(
    plane: LocalPlane, keeper: KeepThread, posts: SimpleQueue[Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = staged(plane), staged(plane)
    stage = plane.stage

    def stage_late(request: RequestId, payload: Payload, *, spare: bool = False) -> Manifest:
        keeper.release([first.copy])
        return stage(request, payload, spare=spare)

    monkeypatch.setattr(plane, "stage", stage_late)
    keeper.put(KeepJob(manifest=first, spare=True))
    keeper.put(KeepJob(manifest=second, spare=True))
    kept = posts.get(timeout=WAIT)
    assert isinstance(kept, CopyKept)
    assert kept.copy == second.copy
    assert len(plane.copies()) == 3


def test_the_end_of_the_process_does_not_wait_for_what_is_being_kept(
    plane: LocalPlane, keeper: KeepThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = Hung()
    monkeypatch.setattr(plane, "pull", hung)
    keeper.put(KeepJob(manifest=staged(plane), spare=True))
    assert hung.begun.wait(WAIT)
    keeper.close()
    keeper.join(WAIT)
    assert not keeper.is_alive()
