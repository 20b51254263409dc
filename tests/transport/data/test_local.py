"""Handoffs inside one process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from triptych.errors import PoolFull, TooLarge, TransferError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data import local
from triptych.transport.data.local import LocalPlane
from triptych.transport.data.protocol import DataPlane, Payload, Pull

MIB = 1 << 20
Open = Callable[..., DataPlane]
Puller = Callable[..., Pull]
Tensors = Callable[[int, int], tuple[torch.Tensor, ...]]
Same = Callable[..., bool]
R = RequestId("r")


def payload(*tensors: torch.Tensor) -> Payload:
    return Payload(tree=b"tree", tensors=tensors)


def test_what_is_pulled_is_what_was_staged(open_here: Open, pull: Puller, tensors: Tensors, same: Same) -> None:
    plane = open_here("local")
    given = tensors(1, 1000)
    got = pull(plane, plane.stage(R, payload(*given)))
    assert same(got.payload.tensors, given)
    assert (got.payload.tree, got.plane) == (b"tree", "local")
    assert plane.planes == ("local",)


def test_neither_the_sender_nor_a_receiver_can_change_a_copy(open_here: Open, pull: Puller) -> None:
    plane = open_here("local")
    given = torch.ones(4)
    manifest = plane.stage(R, payload(given))
    given.zero_()
    first = pull(plane, manifest).payload.tensors[0]
    first.fill_(7)
    assert pull(plane, manifest).payload.tensors[0].tolist() == [1, 1, 1, 1]


def test_bytes_are_counted_and_given_back(open_here: Open, pull: Puller) -> None:
    plane = open_here("local", pool_bytes=MIB)
    manifest = plane.stage(R, payload(torch.zeros(1000)))
    assert 4000 <= plane.used_bytes < 4100
    assert plane.copies() == (manifest,)
    plane.release([manifest.copy, manifest.copy])
    assert plane.used_bytes == 0
    assert plane.copies() == ()
    with pytest.raises(TransferError, match="does not keep copy"):
        pull(plane, manifest)


def test_a_copy_for_which_there_is_no_memory_takes_no_room(
    open_here: Open, pull: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = open_here("local", pool_bytes=MIB)

    def full(tensors: object) -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(local, "_clone", full)
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                plane.stage(R, payload(torch.zeros(MIB // 4)))
    plane.check_integrity()
    assert (plane.used_bytes, plane.copies()) == (0, ())
    whole = torch.ones(MIB // 4)
    assert torch.equal(pull(plane, plane.stage(R, payload(whole))).payload.tensors[0], whole)


def test_the_oldest_copy_goes_when_there_is_no_room(open_here: Open, pull: Puller) -> None:
    plane = open_here("local", pool_bytes=MIB)
    half = torch.zeros(MIB // 2, dtype=torch.uint8)
    first, second, third = (plane.stage(R, payload(half)) for _ in range(3))
    assert plane.take_dropped() == (first.copy,)
    assert plane.take_dropped() == ()
    assert plane.copies() == (second, third)
    with pytest.raises(TransferError):
        pull(plane, first)


def test_a_payload_larger_than_the_pool_is_refused_with_both_sizes(open_here: Open) -> None:
    plane = open_here("local", pool_bytes=MIB)
    with pytest.raises(TooLarge, match=rf"{2 * MIB}.*{MIB}"):
        plane.stage(R, payload(torch.zeros(2 * MIB, dtype=torch.uint8)))
    assert not isinstance(TooLarge(""), PoolFull)


def test_another_instance_of_the_process_can_pull(open_here: Open, pull: Puller) -> None:
    sender, receiver = open_here("local", epoch="one"), open_here("local", epoch="two")
    assert pull(receiver, sender.stage(R, payload(torch.arange(3)))).payload.tensors[0].tolist() == [0, 1, 2]


def test_a_copy_does_not_outlive_its_plane(open_here: Open, pull: Puller) -> None:
    sender = LocalPlane(instance=InstanceId("i"), epoch=Epoch("gone"), pool_bytes=MIB)
    manifest = sender.stage(R, payload(torch.zeros(1)))
    sender.close()
    with pytest.raises(TransferError, match="does not live in this process"):
        pull(open_here("local"), manifest)


def test_a_cancelled_or_late_pull_is_an_error(open_here: Open) -> None:
    plane = open_here("local")
    manifest = plane.stage(R, payload(torch.zeros(1)))
    with pytest.raises(TransferError, match="cancelled"):
        plane.pull(manifest, deadline=time.monotonic() + 9, cancelled=lambda: True)
    with pytest.raises(TransferError, match="deadline"):
        plane.pull(manifest, deadline=time.monotonic() - 1, cancelled=lambda: False)


def test_a_copy_that_is_only_offered_by_other_ways_is_refused(open_here: Open, pull: Puller) -> None:
    pooled = open_here("shm")
    with pytest.raises(TransferError, match="by other ways: shm"):
        pull(open_here("local", epoch="other"), pooled.stage(R, payload(torch.zeros(1))))


@pytest.mark.gpu
def test_tensors_stay_on_their_gpu(open_here: Open, pull: Puller) -> None:
    plane = open_here("local")
    given = torch.randn(1000, device="cuda")
    got = pull(plane, plane.stage(R, payload(given))).payload.tensors[0]
    assert got.device == given.device
    assert torch.equal(got, given)
