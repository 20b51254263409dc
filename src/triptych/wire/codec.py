"""Frames: one ZMQ message is one batch frame (a MessagePack list of messages) followed by raw blob frames.

Senders put everything that they have for one peer into one batch, which is what makes the control plane fast.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from triptych.errors import WireError
from triptych.wire.messages import PROTOCOL_VERSION, FromInstance, ToInstance

_encoder = msgspec.msgpack.Encoder()
_from_instance = msgspec.msgpack.Decoder(list[FromInstance])
_to_instance = msgspec.msgpack.Decoder(list[ToInstance])


class _Greeting(msgspec.Struct):
    """What every version of a hello has."""

    type: str = ""
    instance: str = ""
    protocol: int = PROTOCOL_VERSION


_greetings = msgspec.msgpack.Decoder(list[_Greeting])


def encode_batch(messages: Iterable[FromInstance] | Iterable[ToInstance]) -> bytes:
    """The batch frame of one or more messages for one receiver."""
    return _encoder.encode(list(messages))


def decode_from_instance(frame: bytes) -> list[FromInstance]:
    """Messages that an instance sent; raises `WireError` for anything else, which says so if it is another version."""
    try:
        return _from_instance.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{_other_version(frame)}malformed message from an instance: {error}") from error


def _other_version(frame: bytes) -> str:
    """Which instance of another version greets in a frame that cannot be read; empty for any other frame."""
    try:
        greetings = _greetings.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return ""
    for one in greetings:
        if one.type == "hello" and one.protocol != PROTOCOL_VERSION:
            return (
                f"{one.instance[:80]!r} speaks version {one.protocol} of the protocol, this server {PROTOCOL_VERSION}: "
                "they must be of one release: "
            )
    return ""


def decode_to_instance(frame: bytes) -> list[ToInstance]:
    """Messages that the server sent; raises `WireError` for anything else."""
    try:
        return _to_instance.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"malformed message from the server: {error}") from error
