"""What the tests of an instance's threads share: a real plane in this process, and what the threads tell control."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from triptych.ids import Epoch, InstanceId
from triptych.transport.data.local import LocalPlane
from triptych.worker.jobs import Identity, Post

IDENTITY = Identity(instance=InstanceId("i"), epoch=Epoch("e"))
MIB = 1 << 20


@pytest.fixture
def plane() -> Iterator[LocalPlane]:
    plane = LocalPlane(instance=IDENTITY.instance, epoch=IDENTITY.epoch, pool_bytes=4 * MIB)
    yield plane
    plane.check_integrity()
    plane.close()


@pytest.fixture
def posts() -> SimpleQueue[Post]:
    return SimpleQueue()
