"""Hostile frames: noise, mutated messages, well-typed nonsense, broken ZMTP, messages of an insider, and a ping."""

from __future__ import annotations

import random
import socket
import struct
import types
import typing
from typing import Any

import msgspec

from triptych.ids import Role
from triptych.wire.codec import encode_batch
from triptych.wire.messages import FromInstance, ToInstance

NUMBERS = (0, 1, -1, 2, 127, 255, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -1.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 5e-324)
TEXTS = ("", "x", "\x00", "💥" * 20, "../" * 12, "tcp://127.0.0.1:1", "tcp://[::1", "local", "mooncake", "a" * 3000)
TREES = (None, {}, [], {"blob": 0}, {"a": [1, {"b": 2.5}]})

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


def nonsense(kind: Any, rng: random.Random, known: dict[str, Any]) -> Any:
    """A value of a type of the wire. Fields named in ``known`` get that value, three times out of four."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if hasattr(kind, "__supertype__"):
        return nonsense(kind.__supertype__, rng, known)
    if origin is typing.Literal:
        return rng.choice(args)
    if origin in (typing.Union, types.UnionType):
        return nonsense(rng.choice(args), rng, known)
    if origin is tuple:
        return tuple(nonsense(args[0], rng, known) for _ in range(rng.randrange(3)))
    if origin is dict:
        return {nonsense(args[0], rng, known): nonsense(args[1], rng, known) for _ in range(rng.randrange(3))}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        fields = (field.name for field in msgspec.structs.fields(kind))
        return kind(
            **{
                name: known[name] if name in known and rng.random() < 0.75 else nonsense(hints[name], rng, known)
                for name in fields
            }
        )
    simple: dict[Any, tuple[Any, ...]] = {
        bool: (True, False),
        int: NUMBERS,
        float: FLOATS,
        str: TEXTS,
        bytes: (b"", b"\xc1", bytes(100)),
        types.NoneType: (None,),
        Any: TREES,
        Role: tuple(Role),
    }
    return rng.choice(simple[kind])


def messages(union: Any, rng: random.Random, count: int, known: dict[str, Any]) -> list[bytes]:
    """Frames of well-typed messages of every kind of the union.

    In the name of a ``known`` instance nothing that only ends or replaces a membership, which an insider can of course.
    """
    ends = ("Hello", "Goodbye", "Draining", "Refused") if known else ()
    kinds = [kind for kind in typing.get_args(union) if kind.__name__ not in ends]
    return [
        encode_batch([nonsense(rng.choice(kinds), rng, known) for _ in range(rng.choice((1, 1, 1, 2, 5)))])
        for _ in range(count)
    ]


def mutate(frame: bytes, other: bytes, rng: random.Random) -> bytes:
    """A frame near ``frame``: cut, stretched, flipped, or spliced with another."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 9, 64)))
            case 2 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 3 if data:
                data[at % len(data)] = rng.choice((0xC0, 0xC1, 0xD4, 0xDC, 0xDD, 0xDE, 0xDF, 0x91, 0x81, 0xFF))
            case 4:
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case 5:
                data[at:at] = struct.pack(
                    ">BI", rng.choice((0xDB, 0xDD, 0xDF, 0xC6)), rng.choice((0, 2**31, 2**32 - 1))
                )
            case _:
                data[at:at] = b"\x91" * rng.choice((3, 2000))
    return bytes(data)


class Fuzz:
    """An endless stream of ZMQ messages for one socket, the same for the same seed."""

    def __init__(self, union: Any, seed: int) -> None:
        self._rng = random.Random(seed)
        self._seeds = messages(union, self._rng, 300, {})
        # What belongs to the other direction is no message here either.
        self._seeds += messages(FromInstance if union is ToInstance else ToInstance, self._rng, 30, {})

    def __call__(self) -> list[bytes]:
        rng = self._rng
        roll = rng.random()
        if roll < 0.1:
            return [rng.randbytes(rng.choice((0, 1, 7, 300)))]
        first, second = rng.choice(self._seeds), rng.choice(self._seeds)
        if roll < 0.2:
            return [first]
        frame = mutate(first, second, rng)
        if roll < 0.8:
            return [frame]
        return [frame, *(rng.randbytes(rng.choice((0, 3, 1000))) for _ in range(rng.choice((1, 2, 40))))]


def broken_zmtp(port: int, rng: random.Random) -> None:
    """One TCP connection that says noise, half a greeting, or after a good greeting that a gigantic frame follows."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        match rng.randrange(4):
            case 0:
                sock.sendall(rng.randbytes(rng.choice((1, 11, 64, 4000))))
            case 1:
                sock.sendall(GREETING[: rng.randrange(64)])
            case 2:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            case _:
                ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
                size = rng.choice((2**40, 2**62, 2**64 - 1))
                sock.sendall(
                    GREETING + b"\x04" + bytes([len(ready)]) + ready + b"\x02" + struct.pack(">Q", size) + b"x"
                )


def ping_and_reset(port: int, peer: bytes) -> bool:
    """One TCP connection that shakes hands, sends more messages than are queued and a ping behind them, and is reset.
    Whether the other side shook hands.

    libzmq aborts its process when it comes to answering such a ping (zeromq/libzmq#4364). ``peer`` is a type of ZMQ
    socket that the one at the port talks to.
    """
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(peer)) + peer
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
        heard = b""
        while b"READY" not in heard:
            more = sock.recv(100)
            if not more:
                return False
            heard += more
        sock.sendall(b"\x00\x01x" * 1500 + b"\x04\x07\x04PING\x00\x00")
    return True
