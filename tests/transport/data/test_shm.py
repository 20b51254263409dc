"""Handoffs between processes of one host, by shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from triptych.errors import TransferError
from triptych.ids import RequestId
from triptych.transport.data.protocol import DataPlane, Payload, Pull
from triptych.transport.data.segments import segments
from triptych.wire.manifest import Manifest

MIB = 1 << 20
Open = Callable[..., DataPlane]
Puller = Callable[..., Pull]
Tensors = Callable[[int, int], tuple[torch.Tensor, ...]]
Same = Callable[..., bool]
Sender = Any
"""The fixture of another process that stages."""
Send = Callable[..., Sender]


def everywhere() -> set[str]:
    """The pools that any process of this machine has open or mapped."""
    return set().union(*map(segments, psutil.pids()))


def changed(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with other values in its shm locator."""
    locators = tuple(
        msgspec.structs.replace(locator, **fields) if locator.plane == "shm" else locator
        for locator in manifest.locators
    )
    return msgspec.structs.replace(manifest, locators=locators)


def test_another_process_is_pulled_from(
    open_here: Open, sender: Sender, pull: Puller, tensors: Tensors, same: Same
) -> None:
    plane = open_here()
    for seed, nbytes in enumerate((1, 63, 64, 65, 3 * MIB)):
        manifest = sender.stage(seed, nbytes)
        got = pull(plane, manifest)
        assert same(got.payload.tensors, tensors(seed, nbytes))
        assert (got.plane, got.nbytes, got.payload.tree) == ("shm", manifest.nbytes, b"tree")
    assert plane.used_bytes == 0


def test_a_payload_of_plain_values_crosses_too(open_here: Open, sender: Sender, pull: Puller) -> None:
    got = pull(open_here(), sender.stage(tensors=False))
    assert got.payload == Payload(tree=b"tree", tensors=())
    assert got.nbytes == 0


def test_the_pulled_tensors_outlive_the_copy_and_its_sender(
    open_here: Open, send: Send, pull: Puller, tensors: Tensors, same: Same
) -> None:
    plane, sender = open_here(), send()
    manifest = sender.stage(1, MIB)
    got = pull(plane, manifest)
    assert sender.release(manifest) == 0
    sender.stage(2, MIB)
    sender.kill()
    assert same(got.payload.tensors, tensors(1, MIB))
    got.payload.tensors[1].zero_()


def test_a_copy_that_was_overwritten_meanwhile_fails_its_checksum(
    open_here: Open, sender: Sender, pull: Puller
) -> None:
    plane = open_here()
    manifest = sender.stage(1, MIB)
    sender.release(manifest)
    sender.stage(2, MIB)
    with pytest.raises(TransferError, match=rf"shm: copy .*{manifest.nbytes} bytes.* of sender: the checksum"):
        pull(plane, manifest)


@pytest.mark.parametrize("place", [0, 2 * MIB, 4 * MIB - 1])
def test_a_byte_that_was_changed_meanwhile_fails_the_checksum(open_here: Open, pull: Puller, place: int) -> None:
    plane = open_here("shm")
    manifest = plane.stage(RequestId("r"), Payload(tree=b"", tensors=(torch.zeros(4 * MIB, dtype=torch.uint8),)))
    (locator,) = manifest.locators
    pull(plane, manifest)
    pid, fd, _ = locator.address.split(":")
    with Path(f"/proc/{pid}/fd/{fd}").open("r+b", buffering=0) as pool:
        pool.seek(locator.offset + place)
        pool.write(b"\1")
    with pytest.raises(TransferError, match="the checksum is wrong"):
        pull(plane, manifest)


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 16 * MIB - 64},
        {"offset": -64},
        {"offset": 2**63},
        {"offset": 16 * MIB, "pool_bytes": 2**62},
    ],
    ids=str,
)
def test_a_copy_outside_its_pool_is_refused(
    open_here: Open, sender: Sender, pull: Puller, fields: dict[str, int]
) -> None:
    manifest = sender.stage()
    with pytest.raises(TransferError, match="lies outside its pool"):
        pull(open_here(), changed(manifest, **fields))


@pytest.mark.parametrize("address", ["", "1:0:x", "self:0:abc", "1:1:../../etc", "99999999:3:abc", "1:²:abc"])
def test_an_address_that_is_no_pool_is_refused(open_here: Open, sender: Sender, pull: Puller, address: str) -> None:
    manifest = sender.stage()
    with pytest.raises(TransferError, match="shm: the pool of sender is gone"):
        pull(open_here(), changed(manifest, address=address))


def test_a_dead_sender_is_noticed_at_once_and_its_memory_is_let_go(
    open_here: Open, send: Send, sender: Sender, pull: Puller
) -> None:
    plane, dead = open_here(), send()
    manifest = dead.stage()
    before = segments(os.getpid())
    pull(plane, manifest)
    its = segments(os.getpid()) - before
    assert its
    dead.kill()
    started = time.monotonic()
    with pytest.raises(TransferError, match="the pool of sender is gone"):
        pull(plane, manifest, 120)
    assert time.monotonic() - started < 60  # not by the deadline
    pull(plane, sender.stage())
    assert not its & segments(os.getpid())


def test_a_restarted_sender_is_another_pool(open_here: Open, send: Send, pull: Puller) -> None:
    plane, first = open_here(), send()
    old = first.stage()
    first.kill()
    second = send("sender-2")
    assert pull(plane, second.stage()).plane == "shm"
    with pytest.raises(TransferError):
        pull(plane, old)


@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_no_memory_is_left_behind(send: Send, open_here: Open, pull: Puller, ending: str) -> None:
    sender, plane = send(), open_here()
    pull(plane, sender.stage())
    its = segments(sender.process.pid)
    assert len(its) == 1
    assert its <= segments(os.getpid())  # by which it was pulled from
    if ending == "closed":
        assert sender.close() == 0
    else:
        sender.kill()
    plane.close()
    assert not its & everywhere()
    assert not list(Path("/dev/shm").glob("*triptych*"))


def test_the_pool_is_for_its_user_only_and_its_address_cannot_be_guessed(open_here: Open) -> None:
    addresses: list[str] = []
    for plane in (open_here("shm"), open_here("shm", epoch="receiver-2")):
        (locator,) = plane.stage(RequestId("r"), Payload(tree=b"", tensors=())).locators
        pid, fd, token = locator.address.split(":")
        assert Path(f"/proc/{pid}/fd/{fd}").stat().st_mode & 0o777 == 0o600
        assert len(token) == 32
        addresses.append(token)
    assert addresses[0] != addresses[1]


def test_another_host_has_no_plane_in_common(open_here: Open, sender: Sender, pull: Puller) -> None:
    manifest = changed(sender.stage(), host="another-boot-id")
    with pytest.raises(TransferError, match=r"no data plane in common with sender: it offers local, shm"):
        pull(open_here(), manifest)


def test_a_full_pool_does_not_stop_a_pull(open_here: Open, sender: Sender, pull: Puller) -> None:
    plane = open_here(pool_bytes=4 * MIB)
    plane.stage(RequestId("r"), Payload(tree=b"", tensors=(torch.zeros(4 * MIB, dtype=torch.uint8),)))
    assert pull(plane, sender.stage(1, 8 * MIB)).nbytes > 8 * MIB
