"""A carrier gets the bytes of a copy out of one kind of place; the pooled data plane has one for each plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from triptych.errors import TransferError
from triptych.transport.data.pieces import Intake
from triptych.wire.manifest import Locator, Manifest

Allocate: TypeAlias = Callable[[int], Intake]
"""Makes memory for that many bytes, which the payload will own."""


class Carrier(Protocol):
    """One plane of a pooled data plane: how peers find our copies, and how we get at theirs. Thread-safe."""

    plane: str

    def locator(self, offset: int) -> Locator:
        """How a peer finds the copy at ``offset`` of our pool."""
        ...

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
    ) -> Intake:
        """The ``manifest.nbytes`` (more than 0) bytes of the copy, in memory from ``allocate``, not yet verified.

        Raises `TransferError`.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def within_pool(manifest: Manifest, locator: Locator, pool_bytes: int) -> None:
    """Raise `TransferError` unless the copy lies inside its pool of ``pool_bytes``. Locators are not believed."""
    if locator.offset < 0 or locator.offset + manifest.nbytes > pool_bytes:
        raise TransferError(
            f"{locator.plane}: copy {manifest.copy} of {manifest.producer} lies outside its pool: {manifest.nbytes} "
            f"bytes at {locator.offset} of {pool_bytes}"
        )
