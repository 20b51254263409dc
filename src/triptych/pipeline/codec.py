"""Pipeline state to value tree and tensors, and back: a closed list of types, never pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

import numpy as np
import torch
from PIL import Image

from triptych.errors import StageError, WireError
from triptych.wire import values as wire

_INT64 = range(-(1 << 63), 1 << 64)


def encode_state(values: Mapping[str, Any], kwargs_types: Mapping[str, Sequence[str]]) -> tuple[bytes, tuple[Any, ...]]:
    """The tree in MessagePack and the tensors that it refers to.

    ``values`` are the state's entries; ``kwargs_types`` says which of them belong together under a kwargs type.
    Tensors stay on their device, contiguous. Raises `StageError` that names the entry whose type cannot cross.
    """
    encoder = _Encoder()
    tree = wire.Dict(
        keys=("values", "kwargs_types"),
        items=(encoder.value("", dict(values)), encoder.value("", {k: list(v) for k, v in kwargs_types.items()})),
    )
    return wire.encode_value(tree), tuple(encoder.tensors)


def decode_state(
    tree: bytes, tensors: Sequence[torch.Tensor], device: torch.device
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Entries and kwargs types as `encode_state` took them, with every tensor copied to ``device``.

    The copy is deliberate: a block may write in place, and the sender's copy must stay as it was.
    Raises `WireError` for anything that `encode_state` does not produce.
    """
    state = _Decoder(tensors, device).value(wire.decode_value(tree))
    if not isinstance(state, dict) or set(state) != {"values", "kwargs_types"}:
        raise WireError("not a pipeline state: the tree must have the entries values and kwargs_types")
    values, kwargs_types = state["values"], state["kwargs_types"]
    if not isinstance(values, dict) or not isinstance(kwargs_types, dict):
        raise WireError("not a pipeline state: values and kwargs_types must be mappings")
    for name, keys in kwargs_types.items():
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise WireError(f"not a pipeline state: kwargs type {name!r} must list names")
    return values, kwargs_types


def without_entry(
    tree: bytes, tensors: Sequence[torch.Tensor], path: Sequence[str]
) -> tuple[bytes, tuple[torch.Tensor, ...]] | None:
    """The state without the entry at ``path``; None where it has none.

    Tensors keep their numbers, so those of the entry are empty.
    """
    taken: list[wire.Value] = []
    node = _without(wire.decode_value(tree), ("values", *path), taken)
    if not taken:
        return None
    gone = set(_indices(taken[0]))
    return wire.encode_value(node), tuple(t.new_empty(0) if i in gone else t for i, t in enumerate(tensors))


def _without(node: wire.Value, path: Sequence[str], taken: list[wire.Value]) -> wire.Value:
    if not isinstance(node, wire.Dict) or path[0] not in node.keys:
        return node
    entries = dict(zip(node.keys, node.items, strict=True))
    if len(path) == 1:
        taken.append(entries.pop(path[0]))
    else:
        entries[path[0]] = _without(entries[path[0]], path[1:], taken)
    return wire.Dict(keys=tuple(entries), items=tuple(entries.values()))


def _indices(node: wire.Value) -> Iterator[int]:
    match node:
        case wire.TensorRef() | wire.ArrayRef() | wire.ImageRef() | wire.Generator():
            yield node.index
        case wire.List() | wire.Tuple() | wire.Dict():
            for item in node.items:
                yield from _indices(item)
        case _:
            pass


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def value(self, path: str, value: Any) -> wire.Value:
        """The node of ``value``; ``path`` says where it stands, for the error message."""
        if value is None or type(value) in (bool, str, float):
            return wire.Scalar(value)
        if type(value) is int:
            if value not in _INT64:
                raise _cannot_cross(path, f"integer {value} of more than 64 bits")
            return wire.Scalar(value)
        if isinstance(value, np.generic):
            return self.value(path, value.item())
        if isinstance(value, torch.Tensor):
            return wire.TensorRef(self._tensor(path, value))
        if type(value) is list:
            return wire.List(self._items(path, value))
        if type(value) in (tuple, torch.Size):
            return wire.Tuple(self._items(path, value))
        if type(value) is dict:
            return self._mapping(path, value)
        return self._object(path, value)

    def _object(self, path: str, value: Any) -> wire.Value:
        if isinstance(value, torch.dtype):
            return wire.DType(str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return wire.Device()
        if isinstance(value, torch.Generator):
            return wire.Generator(value.device.type, self._tensor(path, value.get_state()))
        if isinstance(value, Image.Image):
            return self._image(path, value)
        if type(value) is np.ndarray:
            return wire.ArrayRef(self._array(path, value))
        raise _cannot_cross(path, f"type {type(value).__module__}.{type(value).__qualname__}")

    def _items(self, path: str, items: Sequence[Any]) -> tuple[wire.Value, ...]:
        return tuple(self.value(f"{path}[{i}]", item) for i, item in enumerate(items))

    def _mapping(self, path: str, value: dict[Any, Any]) -> wire.Value:
        for key in value:
            if type(key) is not str:
                raise _cannot_cross(path, f"mapping key {key!r} that is not a string")
        prefix = f"{path}." if path else ""
        return wire.Dict(
            keys=tuple(value), items=tuple(self.value(f"{prefix}{key}", item) for key, item in value.items())
        )

    def _tensor(self, path: str, tensor: torch.Tensor) -> int:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise _cannot_cross(path, f"{type(tensor).__name__} of layout {tensor.layout}")
        if tensor.is_meta or tensor.is_quantized:
            raise _cannot_cross(path, "tensor without plain data")
        self.tensors.append(tensor.detach().resolve_conj().resolve_neg().contiguous())
        return len(self.tensors) - 1

    def _array(self, path: str, array: np.ndarray[Any, Any]) -> int:
        try:
            return self._tensor(path, torch.from_numpy(np.array(array, order="C")))
        except TypeError as error:
            raise _cannot_cross(path, f"NumPy array of dtype {array.dtype}") from error

    def _image(self, path: str, image: Image.Image) -> wire.Value:
        if image.mode not in _IMAGE_MODES:
            raise _cannot_cross(path, f"image of mode {image.mode}")
        return wire.ImageRef(image.mode, self._array(path, np.asarray(image)))


_IMAGE_MODES = {"L": 2, "RGB": 3, "RGBA": 3}
"""Modes whose pixels are one uint8 array, with its number of dimensions."""


class _Decoder:
    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device

    def value(self, node: wire.Value) -> Any:
        match node:
            case wire.Scalar():
                return node.value
            case wire.TensorRef():
                return self._tensor(node.index).to(self._device, copy=True)
            case wire.ArrayRef():
                return self._host(node.index).numpy()
            case wire.ImageRef():
                return self._image(node)
            case wire.Generator():
                return self._generator(node)
            case wire.DType():
                return _dtype(node.name)
            case wire.Device():
                return self._device
            case wire.List():
                return [self.value(item) for item in node.items]
            case wire.Tuple():
                return tuple(self.value(item) for item in node.items)
            case wire.Dict():
                if len(node.keys) != len(node.items):
                    raise WireError(f"mapping with {len(node.keys)} keys and {len(node.items)} items")
                return {key: self.value(item) for key, item in zip(node.keys, node.items, strict=True)}
            case _:
                assert_never(node)

    def _tensor(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self._tensors):
            raise WireError(f"tensor {index} of a state that has {len(self._tensors)}")
        return self._tensors[index]

    def _host(self, index: int) -> torch.Tensor:
        return self._tensor(index).to("cpu", copy=True)

    def _image(self, node: wire.ImageRef) -> Image.Image:
        pixels = self._host(node.index)
        if pixels.dtype != torch.uint8 or pixels.ndim != _IMAGE_MODES.get(node.mode):
            raise WireError(f"image of mode {node.mode!r} with pixels {pixels.dtype} {tuple(pixels.shape)}")
        return Image.fromarray(pixels.numpy())

    def _generator(self, node: wire.Generator) -> torch.Generator:
        try:
            generator = torch.Generator(self._device if node.device == self._device.type else node.device)
            generator.set_state(self._host(node.index))
        except (RuntimeError, TypeError) as error:
            raise WireError(f"random generator for {node.device!r} cannot be restored: {error}") from error
        return generator


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"{name!r} is not a torch dtype")
    return dtype


def _cannot_cross(path: str, what: str) -> StageError:
    return StageError(f"state entry {path!r}: {what} cannot cross a role boundary")
