"""Handoffs from GPU memory to GPU memory through the real Mooncake Transfer Engine, over TCP on loopback.

Without a GPU they go through what stands in for its memory.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from tests.transport.data.draining import empty_again, until_drained
from tests.transport.data.gpu_standin import DEVICE, open_gpu_plane
from triptych.config import TransferConfig
from triptych.errors import ConfigError, TransferError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.pooled import PooledPlane
from triptych.transport.data.protocol import DataPlane, Payload, Pull
from triptych.wire.manifest import Locator, Manifest

MIB = 1 << 20
R = RequestId("r")
Puller = Callable[..., Pull]
Tensors = Callable[[int, int], tuple[torch.Tensor, ...]]
Same = Callable[..., bool]
Sender = Any
Send = Callable[..., Sender]
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


def skip_without_cuda_build() -> None:
    """The build for the CPU takes GPU memory for its own, and fails in every transfer."""
    if DEVICE.type == "cpu":
        return
    try:
        importlib.metadata.version("mooncake-transfer-engine-non-cuda")
    except importlib.metadata.PackageNotFoundError:
        return
    pytest.skip("Mooncake's build for the CPU is installed, which reads no GPU memory: install that for CUDA")


@pytest.fixture(scope="module")
def opened() -> Iterator[PooledPlane]:
    skip_without_cuda_build()
    try:
        plane = open_gpu_plane("receiver", "receiver-1", 16 * MIB, 8 * MIB, "gpudirect")
    except ConfigError as error:
        if DEVICE.type == "cpu":
            raise
        pytest.skip(f"no GPU memory for Mooncake here: {error}")
    yield plane
    plane.close()


@pytest.fixture
def plane(opened: PooledPlane) -> Iterator[PooledPlane]:
    """The one plane of this process, which is empty again after each test."""
    yield from empty_again(opened)


@pytest.fixture(scope="module")
def sender(opened: PooledPlane, start: Send) -> Iterator[Sender]:
    """One with 12 MiB for copies on its GPU, and nothing that makes others leave it alone."""
    sender = start("shared-sender", "gpudirect", 64 * MIB, None, {})
    yield sender
    assert sender.close() == 0


def ones(nbytes: int, value: int = 1) -> Payload:
    return Payload(tree=b"", tensors=(torch.full((nbytes,), value, dtype=torch.uint8, device=DEVICE),))


def here(got: Pull) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.cpu() for tensor in got.payload.tensors)


def on_gpu(manifest: Manifest) -> Locator:
    return next(locator for locator in manifest.locators if locator.plane == "gpudirect")


def changed(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with other values in its locator of GPU memory."""
    other = msgspec.structs.replace(on_gpu(manifest), **fields)
    locators = tuple(other if locator.plane == "gpudirect" else locator for locator in manifest.locators)
    return msgspec.structs.replace(manifest, locators=locators)


def test_another_process_is_pulled_from(
    plane: PooledPlane, sender: Sender, pull: Puller, tensors: Tensors, same: Same
) -> None:
    assert plane.planes == ("gpudirect", "mooncake")
    for seed, nbytes in enumerate((1, 63, 65, MIB, 10 * MIB)):  # the last is larger than the whole receiving pool
        manifest = sender.stage(seed, nbytes)
        got = pull(plane, manifest)
        assert (got.plane, got.nbytes, got.payload.tree) == ("gpudirect", manifest.nbytes, b"tree")
        assert all(tensor.device == DEVICE for tensor in got.payload.tensors)
        assert same(here(got), tensors(seed, nbytes))
        sender.release(manifest)
    assert (plane.used_bytes, plane.gpu_used_bytes) == (0, 0)


def test_pulled_tensors_outlive_the_copy_and_its_sender(
    plane: PooledPlane, send: Send, pull: Puller, tensors: Tensors, same: Same
) -> None:
    sender = send("dying", "gpudirect")
    manifest = sender.stage(1, MIB)
    got = pull(plane, manifest)
    assert got.plane == "gpudirect"
    sender.release(manifest)
    sender.stage(2, MIB)
    sender.kill()
    assert same(here(got), tensors(1, MIB))


def test_a_handoff_to_oneself_goes_through_the_engine(plane: PooledPlane, pull: Puller) -> None:
    got = pull(plane, plane.stage(R, ones(MIB, 3)))
    assert got.plane == "gpudirect"
    assert got.payload.tensors[0].eq(3).all()


def test_several_threads_pull_at_once(
    plane: PooledPlane, sender: Sender, pull: Puller, tensors: Tensors, same: Same
) -> None:
    manifests = {seed: sender.stage(seed, 2 * MIB) for seed in range(4)}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            pulled = list(pool.map(lambda manifest: pull(plane, manifest, 60), manifests.values()))
            assert {got.plane for got in pulled} == {"gpudirect"}
            assert all(same(here(got), tensors(seed, 2 * MIB)) for seed, got in zip(manifests, pulled, strict=True))
    for manifest in manifests.values():
        sender.release(manifest)


def test_a_payload_of_plain_values_crosses_too(plane: PooledPlane, sender: Sender, pull: Puller) -> None:
    assert pull(plane, sender.stage(tensors=False)).payload == Payload(tree=b"tree", tensors=())


def test_a_copy_that_made_room_for_later_ones_comes_through_host_memory(
    plane: PooledPlane, sender: Sender, pull: Puller, tensors: Tensors, same: Same
) -> None:
    first, *others = [sender.stage(seed, 5 * MIB) for seed in range(4)]
    got = pull(plane, first)
    assert got.plane == "mooncake"
    assert same(here(got), tensors(0, 5 * MIB))
    assert pull(plane, others[-1]).plane == "gpudirect"
    for manifest in (first, *others):
        sender.release(manifest)


def test_what_the_gpu_pool_cannot_hold_goes_through_host_memory(
    plane: PooledPlane, sender: Sender, pull: Puller
) -> None:
    manifest = sender.stage(1, 13 * MIB)
    assert [locator.plane for locator in manifest.locators] == ["mooncake"]
    assert pull(plane, manifest).plane == "mooncake"
    sender.release(manifest)


def test_a_gpu_pool_full_of_outputs_can_still_receive(plane: PooledPlane, sender: Sender, pull: Puller) -> None:
    mine = [plane.stage(R, ones(MIB, value)) for value in range(6)]
    manifest = sender.stage(5, 4 * MIB)
    assert pull(plane, manifest).plane == "gpudirect"
    assert all(pull(plane, own).plane == "gpudirect" for own in mine)
    sender.release(manifest)


def test_damaged_bytes_are_not_taken(plane: PooledPlane, pull: Puller) -> None:
    manifest = plane.stage(R, ones(1000, 5))
    got = pull(plane, changed(manifest, checksum=on_gpu(manifest).checksum + 1))
    assert got.plane == "mooncake"
    assert got.payload.tensors[0].eq(5).all()
    assert pull(plane, manifest).plane == "gpudirect"  # one wrong copy says nothing against the others


@pytest.mark.parametrize(
    "address",
    [
        *("", "/", "host/7f00", "host:1/zz", "host:1/-5", ":1/7f00", "host:1/" + "f" * 40, "host:0/7f00"),
        *("a b:1/7f00", "x\0y:1/7f00", "a" * 300 + ":1/7f00"),
    ],
    ids=lambda address: repr(address)[:40],
)
def test_an_address_that_is_none_is_refused(plane: PooledPlane, pull: Puller, address: str) -> None:
    manifest = plane.stage(R, ones(100))
    with pytest.raises(TransferError, match="gpudirect: receiver sent an address that is none"):
        pull(plane, changed(manifest, address=address))


@pytest.mark.parametrize("offset", [-64, -1, 8 * MIB, 2**62, -(2**63), 2**64 - 1])
def test_a_locator_beyond_the_pool_is_refused(plane: PooledPlane, pull: Puller, offset: int) -> None:
    manifest = plane.stage(R, ones(100))
    with pytest.raises(TransferError, match=r"gpudirect: .* lies outside its pool"):
        pull(plane, changed(manifest, offset=offset))


def test_a_copy_that_no_sender_makes_is_refused(plane: PooledPlane, pull: Puller) -> None:
    """Symptom: its odd number of bytes ended the pull with an error of torch."""
    manifest = plane.stage(R, Payload(tree=b"", tensors=(torch.ones(3, dtype=torch.uint8, device=DEVICE),)))
    with pytest.raises(TransferError, match=r"mooncake: .* the checksum is wrong"):
        pull(plane, msgspec.structs.replace(manifest, nbytes=3))


@pytest.mark.parametrize("address", ["127.0.0.1:9/7f0000000000", "{session}/7f0000000000"])
def test_memory_that_cannot_be_read_is_passed_by_and_said_once(
    plane: PooledPlane,
    sender: Sender,
    pull: Puller,
    tensors: Tensors,
    same: Same,
    caplog: pytest.LogCaptureFixture,
    address: str,
) -> None:
    """Of nobody, and of a sender that registered none there; which live on."""
    manifest = sender.stage(1, MIB)
    session = on_gpu(manifest).address.partition("/")[0]
    bogus = changed(manifest, address=address.format(session=session), pool_bytes=2**40)
    for _ in range(2):
        got = pull(plane, bogus)
        assert got.plane == "mooncake"
        assert same(here(got), tensors(1, MIB))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "of sender at " in caplog.text
    assert pull(plane, manifest).plane == "gpudirect"
    sender.release(manifest)


def test_a_sender_that_died_is_an_error_within_the_deadline(plane: PooledPlane, send: Send, pull: Puller) -> None:
    sender = send("dying-2", "gpudirect")
    manifest = sender.stage()
    assert pull(plane, manifest).plane == "gpudirect"
    sender.kill()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(TransferError, match="may be dead"):
            pull(plane, manifest, 120)
        assert time.monotonic() - started < 60


def test_a_sender_that_freezes_holds_back_only_the_memory_it_may_still_write_to(
    plane: PooledPlane, send: Send, sender: Sender, pull: Puller
) -> None:
    frozen = send("freezing", "gpudirect")
    manifest = frozen.stage()
    assert pull(plane, manifest).plane == "gpudirect"
    frozen.freeze()
    with pytest.raises(TransferError, match="the deadline passed"):
        pull(plane, manifest, 4.0)
    assert plane.gpu_used_bytes > 0
    plane.check_integrity()
    other = sender.stage()
    assert pull(plane, other).plane == "gpudirect"  # others are served meanwhile
    sender.release(other)
    frozen.wake()
    until_drained(plane)
    assert pull(plane, manifest).plane == "mooncake"  # its GPU memory is left alone for a while


def test_a_pull_from_a_frozen_sender_can_be_cancelled(plane: PooledPlane, send: Send, pull: Puller) -> None:
    frozen = send("freezing-2", "gpudirect")
    manifest = frozen.stage()
    pull(plane, manifest)
    frozen.freeze()
    end = time.monotonic() + 0.3
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"gpudirect: .* cancelled"):
        plane.pull(manifest, deadline=started + 120, cancelled=lambda: time.monotonic() > end)
    assert time.monotonic() - started < 30  # not by the deadline, nor by half of it
    frozen.kill()
    until_drained(plane)


def test_a_receiver_without_gpu_memory_takes_host_memory(
    plane: PooledPlane, sender: Sender, pull: Puller, open_here: Callable[..., DataPlane]
) -> None:
    manifest = sender.stage()
    hosts = tuple(locator for locator in manifest.locators if locator.plane != "gpudirect")
    assert pull(plane, msgspec.structs.replace(manifest, locators=hosts)).plane == "mooncake"
    with pytest.raises(TransferError, match="sender: it offers gpudirect, mooncake, this instance has local, shm"):
        pull(open_here(), manifest)
    sender.release(manifest)


def test_it_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="'gpudirect' needs a GPU and a disagg-transfer-gpu-pool-size"):
        open_plane(TransferConfig(kind="gpudirect", gpu_pool_bytes=MIB), InstanceId("i"), Epoch("e"), "cpu")
