"""The range check that every locator passes before a byte is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import TransferError
from triptych.ids import CopyId, Epoch, InstanceId, RequestId
from triptych.transport.data import layout
from triptych.transport.data.carrier import within_pool
from triptych.transport.data.protocol import DataPlane, Payload, Pull
from triptych.wire.manifest import Locator, Manifest

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 200)
POOL = 128


def manifest(nbytes: int) -> Manifest:
    return Manifest(
        copy=CopyId("c"),
        request=RequestId("r"),
        producer=InstanceId("i"),
        epoch=Epoch("e"),
        nbytes=nbytes,
        checksum=0,
        tensors=(),
        tree=b"",
        locators=(),
    )


@given(NUMBERS, NUMBERS)
def test_what_passes_lies_inside_the_pool(offset: int, nbytes: int) -> None:
    locator = Locator(plane="shm", host="h", address="a", offset=offset, pool_bytes=2**40)
    with contextlib.suppress(TransferError):
        layout.check(manifest(nbytes))
        within_pool(manifest(nbytes), locator, POOL)
        assert bytes(POOL)[offset : offset + nbytes] == bytes(nbytes)
        assert 0 <= offset <= offset + nbytes <= POOL


@pytest.mark.parametrize("kind", ["auto", "shm"])
@pytest.mark.parametrize("offset", [-64, -1, 1 << 20, 2**62, -(2**63), 2**64 - 1])
def test_every_plane_checks_before_it_reads(
    open_here: Callable[..., DataPlane], pull: Callable[..., Pull], kind: str, offset: int
) -> None:
    plane = open_here(kind, pool_bytes=1 << 20)
    staged = plane.stage(RequestId("r"), Payload(tree=b"", tensors=(torch.zeros(100, dtype=torch.uint8),)))
    locators = tuple(msgspec.structs.replace(locator, offset=offset) for locator in staged.locators)
    with pytest.raises(TransferError, match="lies outside its pool"):
        pull(plane, msgspec.structs.replace(staged, locators=locators))
    pull(plane, staged)
