"""Handoffs between processes through the real Mooncake Transfer Engine, over TCP on loopback."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from tests.transport.data.draining import empty_again, until_drained
from triptych.config import TransferConfig
from triptych.errors import ConfigError, TooLarge, TransferError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.pooled import PooledPlane
from triptych.transport.data.protocol import DataPlane, Payload, Pull
from triptych.wire.manifest import Manifest

MIB = 1 << 20
Puller = Callable[..., Pull]
Tensors = Callable[[int, int], tuple[torch.Tensor, ...]]
Same = Callable[..., bool]
Sender = Any
Send = Callable[..., Sender]
R = RequestId("r")


@pytest.fixture(scope="module")
def opened() -> Iterator[PooledPlane]:
    config = TransferConfig(kind="mooncake", pool_bytes=8 * MIB)
    plane = open_plane(config, InstanceId("receiver"), Epoch("receiver-1"), "cpu")
    assert isinstance(plane, PooledPlane)
    yield plane
    plane.close()


@pytest.fixture
def plane(opened: PooledPlane) -> Iterator[PooledPlane]:
    """The one plane of this process, which is empty again after each test."""
    yield from empty_again(opened)


def changed(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with only its Mooncake locator, and other values in that."""
    locators = tuple(
        msgspec.structs.replace(locator, **fields) for locator in manifest.locators if locator.plane == "mooncake"
    )
    return msgspec.structs.replace(manifest, locators=locators)


@pytest.fixture(scope="module")
def sender(start: Send) -> Iterator[Sender]:
    sender = start("shared-sender", "mooncake", 32 * MIB, None, {})
    yield sender
    assert sender.close() == 0


def test_another_process_is_pulled_from(
    plane: DataPlane, sender: Sender, pull: Puller, tensors: Tensors, same: Same
) -> None:
    assert plane.planes == ("mooncake",)
    for seed, nbytes in enumerate((1, 63, 65, MIB, 20 * MIB)):  # the last is larger than the whole receiving pool
        manifest = sender.stage(seed, nbytes)
        got = pull(plane, manifest)
        assert same(got.payload.tensors, tensors(seed, nbytes))
        assert (got.plane, got.nbytes, got.payload.tree) == ("mooncake", manifest.nbytes, b"tree")
        sender.release(manifest)
    assert plane.used_bytes == 0


def test_a_handoff_to_oneself_goes_through_the_engine(
    plane: DataPlane, pull: Puller, tensors: Tensors, same: Same
) -> None:
    got = pull(plane, plane.stage(R, Payload(tree=b"", tensors=tensors(1, MIB))))
    assert got.plane == "mooncake"
    assert same(got.payload.tensors, tensors(1, MIB))


def test_several_threads_pull_at_once(
    plane: DataPlane, sender: Sender, pull: Puller, tensors: Tensors, same: Same
) -> None:
    manifests = {seed: sender.stage(seed, 3 * MIB) for seed in range(4)}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            pulled = pool.map(lambda manifest: pull(plane, manifest, 60), manifests.values())
            assert all(
                same(got.payload.tensors, tensors(seed, 3 * MIB)) for seed, got in zip(manifests, pulled, strict=True)
            )
    for manifest in manifests.values():
        sender.release(manifest)


def test_a_payload_of_plain_values_crosses_too(plane: DataPlane, sender: Sender, pull: Puller) -> None:
    assert pull(plane, sender.stage(tensors=False)).payload == Payload(tree=b"tree", tensors=())


def test_a_copy_that_was_overwritten_meanwhile_fails_its_checksum(
    plane: DataPlane, sender: Sender, pull: Puller
) -> None:
    manifest = sender.stage(1, MIB)
    sender.release(manifest)
    sender.release(sender.stage(2, MIB))
    with pytest.raises(TransferError, match=r"mooncake: copy .* of sender: the checksum is wrong"):
        pull(plane, manifest)


@pytest.mark.parametrize(
    "fields", [{"offset": 32 * MIB - 64}, {"offset": -64}, {"offset": 2**62}, {"pool_bytes": 64}], ids=str
)
def test_a_copy_outside_its_pool_is_refused(
    plane: DataPlane, sender: Sender, pull: Puller, fields: dict[str, int]
) -> None:
    with pytest.raises(TransferError, match="lies outside its pool"):
        pull(plane, changed(sender.stage(), **fields))


def test_the_sender_refuses_to_be_read_outside_its_pool_and_lives_on(
    plane: DataPlane, sender: Sender, pull: Puller
) -> None:
    manifest = sender.stage()
    with pytest.raises(TransferError, match="refused"):
        pull(plane, changed(manifest, offset=32 * MIB, pool_bytes=2**40))
    pull(plane, manifest)


@pytest.mark.parametrize(
    "fields",
    [
        *({"address": address} for address in ("", "/", "host/7f00", "host:1/zz", "host:1/-5", ":1/7f00")),
        *({"address": address} for address in ("host:1/" + "f" * 40, "host:0/7f00", "host:65536/7f00", "host:²/7f00")),
        *({"address": address} for address in ("a b:1/7f00", "x\0y:1/7f00", "a" * 300 + ":1/7f00")),
        {"address": "host:1/7f0000000000", "pool_bytes": 2**64 - 1},
    ],
    ids=lambda fields: repr(fields)[:40],
)
def test_an_address_that_is_none_is_refused(
    plane: DataPlane, sender: Sender, pull: Puller, fields: dict[str, Any]
) -> None:
    with pytest.raises(TransferError, match="an address that is none"):
        pull(plane, changed(sender.stage(), **fields))


def test_a_pool_full_of_outputs_can_still_receive(
    plane: DataPlane, sender: Sender, pull: Puller, tensors: Tensors, same: Same
) -> None:
    full = torch.zeros(plane.pool_bytes, dtype=torch.uint8)
    mine = plane.stage(R, Payload(tree=b"", tensors=(full,)))
    assert same(pull(plane, sender.stage(5, 4 * MIB)).payload.tensors, tensors(5, 4 * MIB))
    assert plane.take_dropped() == ()
    plane.release([mine.copy])


def test_what_can_be_staged_is_told_and_more_is_refused(plane: DataPlane) -> None:
    assert 0 < plane.pool_bytes < 8 * MIB
    with pytest.raises(TooLarge, match=str(plane.pool_bytes)):
        plane.stage(R, Payload(tree=b"", tensors=(torch.zeros(plane.pool_bytes + 1, dtype=torch.uint8),)))


def test_a_sender_that_was_never_there_is_an_error_at_once(plane: DataPlane, sender: Sender, pull: Puller) -> None:
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"of sender at 127\.0\.0\.1:9: .* cannot be reached"):
        pull(plane, changed(sender.stage(), address="127.0.0.1:9/7f0000000000"), 120)
    assert time.monotonic() - started < 60


def test_a_sender_that_died_is_an_error_within_the_deadline(plane: DataPlane, send: Send, pull: Puller) -> None:
    sender = send("dying", "mooncake")
    manifest = sender.stage()
    pull(plane, manifest)
    sender.kill()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(TransferError, match="may be dead"):
            pull(plane, manifest, 120)
        assert time.monotonic() - started < 60


def test_a_sender_that_freezes_holds_back_only_the_memory_it_may_still_write_to(
    plane: DataPlane, send: Send, sender: Sender, pull: Puller
) -> None:
    frozen = send("freezing", "mooncake")
    manifest = frozen.stage()
    pull(plane, manifest)
    frozen.freeze()
    with pytest.raises(TransferError, match="the deadline passed") as caught:
        pull(plane, manifest, 0.5)
    assert not caught.value.drained
    assert plane.used_bytes > 0
    plane.check_integrity()
    pull(plane, sender.stage())  # others are served meanwhile
    frozen.wake()
    until_drained(plane)
    pull(plane, manifest)


def test_a_pull_from_a_frozen_sender_can_be_cancelled(plane: DataPlane, send: Send, pull: Puller) -> None:
    frozen = send("freezing-2", "mooncake")
    manifest = frozen.stage()
    pull(plane, manifest)
    frozen.freeze()
    end = time.monotonic() + 0.3
    started = time.monotonic()
    with pytest.raises(TransferError, match="cancelled"):
        plane.pull(manifest, deadline=started + 60, cancelled=lambda: time.monotonic() > end)
    assert time.monotonic() - started < 30  # not by the deadline
    frozen.kill()
    until_drained(plane)


@pytest.mark.slow  # the system keeps the port of a killed process for a minute
def test_a_sender_that_restarts_on_its_old_port_is_found_again(
    plane: DataPlane, send: Send, pull: Puller, tensors: Tensors, same: Same
) -> None:
    low = random.randrange(15000, 16900, 10)
    env = {"MC_MIN_RPC_PORT": str(low), "MC_MAX_RPC_PORT": str(low + 9)}
    first = send("life-1", "mooncake", env=env)
    old = first.stage(1)
    pull(plane, old)
    port = int(old.locators[0].address.partition("/")[0].rpartition(":")[2])
    first.kill()
    second = send("life-2", "mooncake", port=port, env=env)
    new = second.stage(2)
    assert new.locators[0].address.partition("/")[0] == old.locators[0].address.partition("/")[0]
    found = pull(plane, new)
    assert same(found.payload.tensors, tensors(2, MIB))
    with pytest.raises(TransferError):
        pull(plane, old)


def test_a_process_has_one_engine(plane: DataPlane) -> None:
    with pytest.raises(ConfigError, match="can be one"):
        open_plane(TransferConfig(kind="mooncake"), InstanceId("i"), Epoch("e"), "cpu")
