"""The one small protocol behind which every way of moving tensors stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.ids import CopyId, RequestId
from triptych.wire.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """A stage's output or input in memory: a value tree and the tensors that it refers to by number."""

    tree: bytes
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors without padding."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """A finished pull: the payload (on the CPU or on the plane's device) and how it came."""

    payload: Payload
    plane: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFigures:
    """The pool of a plane, in bytes."""

    used: int
    peak: int
    refusals: int
    """How often there was no room; who waits for room asks several times."""


class DataPlane(Protocol):
    """Staging and pulling for one instance. Thread-safe; every wait has a deadline."""

    planes: tuple[str, ...]
    """Names of the planes that its copies can be pulled by, best first."""
    pool_bytes: int

    def stage(self, request: RequestId, payload: Payload, *, spare: bool = False) -> Manifest:
        """Copy the payload into the pool and describe it. The copy stays until `release` or until dropped under
        pressure (oldest unpinned first). A ``spare`` copy is dropped before all others and displaces only its like.

        Raises `TooLarge` with both sizes when it can never fit, `PoolFull` when there is no room at present.
        """
        ...

    def pull(self, manifest: Manifest, *, deadline: float, cancelled: Callable[[], bool]) -> Pull:
        """Fetch and verify a copy. ``deadline`` is in `time.monotonic` seconds. The payload owns its memory.

        Raises `TransferError` (wrong checksum, dead or unreachable sender, stale epoch, deadline, cancelled).
        """
        ...

    def release(self, copies: Sequence[CopyId]) -> None:
        """Free copies; unknown ones are ignored."""
        ...

    def copies(self) -> tuple[Manifest, ...]:
        """The copies that are staged now."""
        ...

    def take_dropped(self) -> tuple[CopyId, ...]:
        """Copies that were dropped under pressure since the last call."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool that are taken."""
        ...

    @property
    def figures(self) -> PoolFigures:
        """How full the pool is and was."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when the books of the pool do not add up."""
        ...

    def close(self) -> None:
        """Give everything back; no segment, socket or thread stays behind."""
        ...
