"""The manifest of a handoff: which tensors a staged copy holds, where it can be pulled from, and its checksum."""

from __future__ import annotations

import msgspec

from triptych.ids import CopyId, Epoch, InstanceId, RequestId

PIECE_BYTES = 512 << 10
"""Bytes of a copy that are digested apart: two such pieces, source and target, lie in a core's own cache."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor inside a copy, stored contiguously in C order."""

    dtype: str
    """torch's name without the prefix, e.g. ``bfloat16``."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the copy; a multiple of 64."""
    nbytes: int


class Locator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to reach a copy. A receiver takes the best one that it can use."""

    plane: str
    """Name of the data plane: ``local``, ``shm``, ``cuda-ipc``, ``gpudirect`` or ``mooncake``."""
    host: str
    """Boot id of the machine, so that same-host planes are used on one host only."""
    address: str
    """What the plane needs to reach the pool: process epoch, segment name, or transfer-engine session."""
    offset: int
    """Where the copy starts in that address space: bytes into the segment, or a remote address."""
    pool_bytes: int
    """Size of the pool; a receiver refuses a copy that would lie outside it."""
    checksum: int = 0
    """Of planes that have a checksum of their own, ``cuda-ipc`` and ``gpudirect``: the sum of the copy's 64-bit words,
    each times an odd number of its own, as a signed number of 64 bits."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A staged copy of a stage's output, as its receiver needs to know it."""

    copy: CopyId
    request: RequestId
    producer: InstanceId
    epoch: Epoch
    """Life of the producer in which the copy was staged; a copy does not outlive it."""
    nbytes: int
    """Bytes of all tensors with their padding; 0 when the output is plain values only."""
    checksum: int
    """xxh3-64 over the xxh3-64 digests, 8 bytes in big-endian order each, of the pieces of `PIECE_BYTES` that the
    ``nbytes`` bytes of the copy fall into, of which the last may be shorter; 0 when it never leaves the process."""
    tensors: tuple[TensorEntry, ...]
    tree: bytes
    """The state dictionary as a value tree in MessagePack (`triptych.wire.values`)."""
    locators: tuple[Locator, ...]
