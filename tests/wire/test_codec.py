"""Messages survive the trip, and nothing but a message gets through."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triptych.errors import WireError
from triptych.ids import Epoch, InstanceId
from triptych.wire.codec import decode_from_instance, decode_to_instance, encode_batch
from triptych.wire.messages import ID_LENGTH, PROTOCOL_VERSION, FromInstance, Goodbye, Refused, ToInstance, Unknown

quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))

GOODBYE = Goodbye(instance=InstanceId("i"), epoch=Epoch("e"), server_epoch=None, reason="")
UNKNOWN = Unknown(server_epoch=Epoch("s"), epoch=Epoch("e"))


@pytest.mark.parametrize("kind", typing.get_args(FromInstance), ids=lambda kind: kind.__name__)
def test_every_message_of_an_instance_survives_the_trip(kind: type, strategy_of: Callable[[Any], Any]) -> None:
    @quick
    @given(st.lists(strategy_of(kind), max_size=3))
    def check(messages: list[Any]) -> None:
        assert decode_from_instance(encode_batch(messages)) == messages

    check()


@pytest.mark.parametrize("kind", typing.get_args(ToInstance), ids=lambda kind: kind.__name__)
def test_every_message_of_the_server_survives_the_trip(kind: type, strategy_of: Callable[[Any], Any]) -> None:
    @quick
    @given(st.lists(strategy_of(kind), max_size=3))
    def check(messages: list[Any]) -> None:
        assert decode_to_instance(encode_batch(messages)) == messages

    check()


@pytest.mark.parametrize("kind", typing.get_args(FromInstance) + typing.get_args(ToInstance), ids=lambda k: k.__name__)
def test_a_field_that_is_not_known_is_refused(kind: type, strategy_of: Callable[[Any], Any]) -> None:
    decode = decode_from_instance if kind in typing.get_args(FromInstance) else decode_to_instance

    @settings(quick, max_examples=5)
    @given(strategy_of(kind))
    def check(message: Any) -> None:
        fields = msgspec.msgpack.decode(encode_batch([message]))[0]
        with pytest.raises(WireError, match="surprise"):
            decode(msgspec.msgpack.encode([{**fields, "surprise": 1}]))

    check()


@pytest.mark.parametrize("kind", typing.get_args(FromInstance), ids=lambda kind: kind.__name__)
def test_a_field_that_is_missing_or_of_another_type_is_refused(kind: type, strategy_of: Callable[[Any], Any]) -> None:
    required = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]

    @settings(quick, max_examples=5)
    @given(strategy_of(kind), st.sampled_from(required))
    def check(message: Any, name: str) -> None:
        fields = msgspec.msgpack.decode(encode_batch([message]))[0]
        with pytest.raises(WireError):
            decode_from_instance(msgspec.msgpack.encode([{key: fields[key] for key in fields if key != name}]))
        with pytest.raises(WireError):
            decode_from_instance(msgspec.msgpack.encode([{**fields, name: {"a": {"b": 1}}}]))

    check()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_a_wire_error_or_an_empty_batch(frame: bytes) -> None:
    for decode in (decode_from_instance, decode_to_instance):
        with contextlib.suppress(WireError):
            assert decode(frame) == []


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_frame_is_a_wire_error_or_another_message(data: st.DataObject) -> None:
    frame = bytearray(encode_batch([GOODBYE, GOODBYE]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        messages = decode_from_instance(bytes(frame))
    except WireError:
        return
    assert all(isinstance(message, msgspec.Struct) for message in messages)


def test_a_truncated_frame_is_a_wire_error() -> None:
    frame = encode_batch([GOODBYE])
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode_from_instance(frame[:length])


def test_endless_nesting_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode_to_instance(b"\x91" * 100_000)


def test_an_instance_of_another_version_is_named_with_its_version() -> None:
    """Its hello has other fields, so all that can be read is who it is."""
    hello = {"type": "hello", "instance": "old-one", "protocol": 2, "text_bytes": 4096}
    with pytest.raises(WireError, match="'old-one' speaks version 2 of the protocol"):
        decode_from_instance(msgspec.msgpack.encode([hello]))
    with pytest.raises(WireError, match="malformed"):
        decode_from_instance(msgspec.msgpack.encode([hello | {"protocol": PROTOCOL_VERSION}]))


def test_an_instance_of_an_earlier_version_can_read_why_it_is_refused() -> None:
    refused = Refused(server_epoch=Epoch("s"), epoch=Epoch("e"), reason="protocol=5: this server speaks version 6")
    (sent,) = msgspec.msgpack.decode(encode_batch([refused]))
    assert sent == {"type": "refused", "server_epoch": "s", "epoch": "e", "reason": refused.reason}
    assert decode_to_instance(encode_batch([refused])) == [refused]


def test_the_two_directions_do_not_mix() -> None:
    with pytest.raises(WireError):
        decode_to_instance(encode_batch([GOODBYE]))
    with pytest.raises(WireError):
        decode_from_instance(encode_batch([UNKNOWN]))


def test_a_message_without_its_batch_is_refused() -> None:
    with pytest.raises(WireError):
        decode_from_instance(msgspec.msgpack.encode(GOODBYE))


@pytest.mark.parametrize("field", ["instance", "epoch", "server_epoch"])
def test_an_id_longer_than_any_of_ours_is_no_message(field: str) -> None:
    """Answers repeat ids, and wait in memory for peers that do not read them."""
    ids = {"instance": InstanceId("i"), "epoch": Epoch("e"), "server_epoch": Epoch("s")}
    assert decode_from_instance(encode_batch([Goodbye(**ids | {field: "x" * ID_LENGTH}, reason="")]))
    with pytest.raises(WireError, match=f"length <= {ID_LENGTH}"):
        decode_from_instance(encode_batch([Goodbye(**ids | {field: "x" * (ID_LENGTH + 1)}, reason="")]))
