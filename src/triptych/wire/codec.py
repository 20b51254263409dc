"""Frames: one ZMQ message is one batch frame (a MessagePack list of messages) followed by raw blob frames.

Senders put everything that they have for one peer into one batch, which is what makes the control plane fast.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from triptych.errors import WireError
from triptych.wire.messages import FromInstance, ToInstance

_encoder = msgspec.msgpack.Encoder()
_from_instance = msgspec.msgpack.Decoder(list[FromInstance])
_to_instance = msgspec.msgpack.Decoder(list[ToInstance])


def encode_batch(messages: Iterable[FromInstance] | Iterable[ToInstance]) -> bytes:
    """The batch frame of one or more messages for one receiver."""
    return _encoder.encode(list(messages))


def decode_from_instance(frame: bytes) -> list[FromInstance]:
    """Messages that an instance sent; raises `WireError` for anything else."""
    try:
        return _from_instance.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"malformed message from an instance: {error}") from error


def decode_to_instance(frame: bytes) -> list[ToInstance]:
    """Messages that the server sent; raises `WireError` for anything else."""
    try:
        return _to_instance.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"malformed message from the server: {error}") from error
