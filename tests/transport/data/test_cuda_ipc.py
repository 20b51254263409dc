"""Handoffs between processes through GPU memory; without a GPU, through what stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from tests.transport.data.gpu_standin import DEVICE, StandIn, open_gpu_plane
from triptych.config import TransferConfig
from triptych.errors import ConfigError, TransferError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.gpu_pool import weighted_sum
from triptych.transport.data.plane import open_plane
from triptych.transport.data.pooled import PooledPlane
from triptych.transport.data.protocol import Payload, Pull
from triptych.wire.manifest import Manifest

MIB = 1 << 20
R = RequestId("r")
Open = Callable[..., PooledPlane]
Puller = Callable[..., Pull]
Tensors = Callable[[int, int], tuple[torch.Tensor, ...]]
Same = Callable[..., bool]
Send = Callable[..., Any]
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.fixture
def open_gpu() -> Iterator[Open]:
    """Open a plane with a GPU pool in this process; its books are checked and it is closed at the end."""
    planes: list[PooledPlane] = []

    def start(name: str = "receiver", pool_bytes: int = 16 * MIB, gpu_pool_bytes: int = 4 * MIB) -> PooledPlane:
        planes.append(open_gpu_plane(name, name, pool_bytes, gpu_pool_bytes))
        return planes[-1]

    yield start
    for plane in planes:
        plane.check_integrity()
        plane.close()


def ones(nbytes: int, value: int = 1) -> Payload:
    return Payload(tree=b"", tensors=(torch.full((nbytes,), value, dtype=torch.uint8, device=DEVICE),))


def here(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.cpu() for tensor in tensors)


def planes_of(manifest: Manifest) -> set[str]:
    return {locator.plane for locator in manifest.locators}


def changed(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with other values in its locator of GPU memory."""
    locators = tuple(
        msgspec.structs.replace(locator, **fields) if locator.plane == "cuda-ipc" else locator
        for locator in manifest.locators
    )
    return msgspec.structs.replace(manifest, locators=locators)


def test_another_process_is_pulled_from(open_gpu: Open, send: Send, pull: Puller, tensors: Tensors, same: Same) -> None:
    plane, sender = open_gpu(), send(kind="cuda-ipc")
    for seed, nbytes in enumerate((1, 63, 64, 65, 3 * MIB)):
        manifest = sender.stage(seed, nbytes)
        got = pull(plane, manifest)
        assert got.plane == "cuda-ipc"
        assert all(tensor.device == DEVICE for tensor in got.payload.tensors)
        assert same(here(got.payload.tensors), tensors(seed, nbytes))


def test_pulled_tensors_outlive_the_copy_and_its_sender(
    open_gpu: Open, send: Send, pull: Puller, tensors: Tensors, same: Same
) -> None:
    plane, sender = open_gpu(), send(kind="cuda-ipc")
    manifest = sender.stage(1, MIB)
    got = pull(plane, manifest)
    sender.release(manifest)
    sender.stage(2, MIB)
    sender.kill()
    assert same(here(got.payload.tensors), tensors(1, MIB))


def test_a_copy_that_made_room_for_later_ones_comes_through_host_memory(
    open_gpu: Open, send: Send, pull: Puller, tensors: Tensors, same: Same
) -> None:
    plane, sender = open_gpu(), send(kind="cuda-ipc")  # with 4 MiB on its GPU
    first, *others = [sender.stage(seed, 3 * MIB) for seed in range(4)]
    got = pull(plane, first)
    assert got.plane == "shm"
    assert same(here(got.payload.tensors), tensors(0, 3 * MIB))
    assert pull(plane, others[-1]).plane == "cuda-ipc"


def test_what_the_gpu_pool_cannot_hold_goes_through_host_memory(open_gpu: Open, pull: Puller) -> None:
    sender, receiver = open_gpu("sender"), open_gpu()
    manifest = sender.stage(R, ones(5 * MIB))
    assert planes_of(manifest) == {"local", "shm"}
    assert pull(receiver, manifest).plane == "shm"


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the stand-in's tensors are on the CPU")
def test_tensors_that_are_not_on_the_gpu_go_through_host_memory(open_gpu: Open) -> None:
    manifest = open_gpu().stage(R, Payload(tree=b"", tensors=(torch.ones(100),)))
    assert planes_of(manifest) == {"local", "shm"}


def test_spare_copies_take_no_gpu_memory(open_gpu: Open) -> None:
    assert planes_of(open_gpu().stage(R, ones(100), spare=True)) == {"local", "shm"}


def test_a_handoff_to_oneself_stays_on_the_gpu(open_gpu: Open, pull: Puller) -> None:
    plane = open_gpu()
    manifest = plane.stage(R, ones(1000, 3))
    got = pull(plane, manifest)
    assert got.plane == "cuda-ipc"
    got.payload.tensors[0].fill_(7)
    assert pull(plane, manifest).payload.tensors[0].eq(3).all()


def test_released_copies_make_room(open_gpu: Open, pull: Puller) -> None:
    plane = open_gpu()  # to itself: CUDA does not map what another plane of the same process has
    for value in range(20):
        manifest = plane.stage(R, ones(3 * MIB, value))
        got = pull(plane, manifest)
        assert got.plane == "cuda-ipc"
        assert got.payload.tensors[0].eq(value).all()
        plane.release([manifest.copy])


def test_a_copy_dropped_from_the_host_pool_leaves_the_gpu_too(open_gpu: Open) -> None:
    plane = open_gpu(pool_bytes=4 * MIB, gpu_pool_bytes=16 * MIB)
    for _ in range(20):
        assert "cuda-ipc" in planes_of(plane.stage(R, ones(3 * MIB)))
    assert len(plane.copies()) == 1


def test_damaged_bytes_are_not_taken(open_gpu: Open, pull: Puller) -> None:
    plane = open_gpu()
    manifest = plane.stage(R, ones(1000, 5))
    locator = next(locator for locator in manifest.locators if locator.plane == "cuda-ipc")
    assert pull(plane, manifest).plane == "cuda-ipc"
    got = pull(plane, changed(manifest, checksum=locator.checksum + 1))
    assert got.plane == "local"
    assert got.payload.tensors[0].eq(5).all()


@pytest.mark.parametrize(
    "address", ["", "/", "1:2:3/", "1:2:3/zz", "nobody/" + "ab" * 64, "1:2:abc/" + "ab" * 64, "1:2:abc/" + "ab" * 63]
)
def test_an_address_that_is_none_is_passed_by(open_gpu: Open, pull: Puller, address: str) -> None:
    sender, receiver = open_gpu("sender"), open_gpu()
    assert pull(receiver, changed(sender.stage(R, ones(100)), address=address)).plane == "shm"


@pytest.mark.parametrize("offset", [-64, -1, 4 * MIB, 2**62, -(2**63), 2**64 - 1])
def test_a_locator_beyond_the_pool_is_refused(open_gpu: Open, pull: Puller, offset: int) -> None:
    plane = open_gpu()
    manifest = changed(plane.stage(R, ones(100)), offset=offset, pool_bytes=2**63 - 1)
    with pytest.raises(TransferError, match="lies outside its pool"):
        pull(plane, manifest)


def test_a_receiver_without_a_gpu_pool_takes_shared_memory(open_gpu: Open, open_here: Open, pull: Puller) -> None:
    assert pull(open_here(), open_gpu("sender").stage(R, ones(100))).plane == "shm"


def test_memory_that_cannot_be_mapped_is_passed_by_and_said_once(
    open_gpu: Open, send: Send, pull: Puller, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = send(kind="cuda-ipc"), open_gpu()
    for seed in range(2):
        manifest = sender.stage(seed, 100)
        locator = next(locator for locator in manifest.locators if locator.plane == "cuda-ipc")
        owner = locator.address.rpartition("/")[0]
        assert pull(receiver, changed(manifest, address=f"{owner}/{'ab' * 64}")).plane == "shm"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "sender" in caplog.text


def test_the_memory_of_the_dead_is_let_go_of(open_gpu: Open, send: Send, pull: Puller) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("what is mapped is counted by the stand-in")
    memory = StandIn()
    config = TransferConfig(pool_bytes=MIB, gpu_pool_bytes=MIB)
    receiver = PooledPlane(config, InstanceId("receiver"), Epoch("receiver"), gpu=None, shared=memory)
    dying, living = send(kind="cuda-ipc"), send(epoch="sender-2", kind="cuda-ipc")
    assert pull(receiver, dying.stage(1, 100)).plane == "cuda-ipc"
    dying.freeze()
    assert pull(receiver, living.stage(1, 100)).plane == "cuda-ipc"
    assert len(memory.mapped) == 2
    dying.kill()
    pull(receiver, living.stage(2, 100))
    assert len(memory.mapped) == 1
    receiver.close()
    assert (memory.mapped, memory.files) == ({}, {})


def test_a_gpu_pool_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="needs a GPU and a disagg-transfer-gpu-pool-size"):
        open_plane(TransferConfig(kind="cuda-ipc", gpu_pool_bytes=MIB), InstanceId("i"), Epoch("e"), "cpu")
    with pytest.raises(ConfigError, match="disagg-transfer-gpu-pool-size=7: must be 0 or at least 1 MiB"):
        TransferConfig(gpu_pool_bytes=7)


def test_the_checksum_of_a_gpu_sees_each_word_and_its_place() -> None:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (8 * ((1 << 20) + 3),), dtype=torch.uint8, generator=generator).to(DEVICE)
    whole = int(weighted_sum(data))
    assert int(weighted_sum(data.clone())) == whole
    for place in (0, 7, 8, data.numel() // 2, data.numel() - 1):
        other = data.clone()
        other[place] ^= 128
        assert int(weighted_sum(other)) != whole
    words = data.view(torch.int64).clone()
    words[[0, (1 << 20) + 1]] = words[[(1 << 20) + 1, 0]]
    assert int(weighted_sum(words.view(torch.uint8))) != whole
    assert int(weighted_sum(data[: -8 * 3])) != whole
