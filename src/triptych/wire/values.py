"""Pipeline state on the wire: a closed tree of plain values in which tensors stand as numbered references.

The tree knows nothing of torch; `triptych.pipeline.codec` maps real objects to it and back. Anything that has no node
here cannot cross a role boundary, which is the point: no pickle, no surprises.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from triptych.errors import WireError


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """Common shape of all nodes: MessagePack arrays that start with their tag."""


class Scalar(_Node, frozen=True, tag="s"):
    """None, a boolean, an integer, a float or a string."""

    value: bool | int | float | str | None


class TensorRef(_Node, frozen=True, tag="t"):
    """Tensor number ``index`` of the manifest that the tree travels with."""

    index: int


class ArrayRef(_Node, frozen=True, tag="n"):
    """A NumPy array whose data is tensor number ``index``."""

    index: int


class ImageRef(_Node, frozen=True, tag="i"):
    """A PIL image; tensor ``index`` holds its pixels, uint8 [height, width] or [height, width, channels]."""

    mode: str
    index: int


class Generator(_Node, frozen=True, tag="g"):
    """A torch random generator of ``device`` type; tensor ``index`` holds its state, uint8."""

    device: str
    index: int


class DType(_Node, frozen=True, tag="d"):
    """A torch dtype by name, e.g. ``bfloat16``."""

    name: str


class Device(_Node, frozen=True, tag="D"):
    """A torch device; decodes to the receiver's own."""


class List(_Node, frozen=True, tag="l"):
    """A list."""

    items: tuple[Value, ...]


class Tuple(_Node, frozen=True, tag="u"):
    """A tuple."""

    items: tuple[Value, ...]


class Dict(_Node, frozen=True, tag="m"):
    """A mapping with string keys; ``keys`` and ``items`` have equal lengths."""

    keys: tuple[str, ...]
    items: tuple[Value, ...]


Value: TypeAlias = Scalar | TensorRef | ArrayRef | ImageRef | Generator | DType | Device | List | Tuple | Dict

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Value)


def encode_value(value: Value) -> bytes:
    """The tree as MessagePack."""
    return _encoder.encode(value)


def decode_value(data: bytes) -> Value:
    """The tree of ``data``; raises `WireError` when it is anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not a value tree: {error}") from error
