"""A carrier gets the bytes of a copy out of one kind of place; the pooled data plane has one for each plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from triptych.errors import TransferError
from triptych.transport.data.pieces import Intake
from triptych.wire.manifest import Locator, Manifest

Allocate: TypeAlias = Callable[[int], Intake]
"""Makes memory for that many bytes, which the payload will own."""


class Carrier(Protocol):
    """One plane of a pooled data plane: how we get at the copies of peers. Thread-safe."""

    plane: str

    def reaches(self, locator: Locator) -> bool:
        """Whether this carrier can get at what the locator points to."""
        ...

    def fetch(
        self,
        manifest: Manifest,
        locator: Locator,
        allocate: Allocate,
        *,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> Intake | torch.Tensor | None:
        """The ``manifest.nbytes`` (more than 0) bytes of the copy: in memory from ``allocate``, not yet verified, or
        verified on a GPU as uint8 [nbytes]. None when they are to be had by another carrier only.

        Raises `TransferError`.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class HostCarrier(Carrier, Protocol):
    """A carrier by which peers reach all copies of our pool in host memory."""

    def locator(self, offset: int) -> Locator:
        """How a peer finds the copy at ``offset`` of our pool."""
        ...


class GpuCarrier(Carrier, Protocol):
    """A carrier by which peers reach the copies that are in our pool in GPU memory."""

    def locator(self, offset: int, checksum: int) -> Locator:
        """How a peer finds the copy at ``offset`` of that pool, with its `weighted_sum`."""
        ...


def within_pool(manifest: Manifest, locator: Locator, pool_bytes: int) -> None:
    """Raise `TransferError` unless the copy lies inside its pool of ``pool_bytes``. Locators are not believed."""
    if locator.offset < 0 or locator.offset + manifest.nbytes > pool_bytes:
        raise TransferError(
            f"{locator.plane}: copy {manifest.copy} of {manifest.producer} lies outside its pool: {manifest.nbytes} "
            f"bytes at {locator.offset} of {pool_bytes}"
        )
