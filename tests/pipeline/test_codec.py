"""State through bytes: what crosses comes back equal, what must not cross is refused by name."""

from __future__ import annotations

import contextlib
import decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from triptych.errors import StageError, WireError
from triptych.pipeline.codec import decode_state, encode_state
from triptych.wire import values as wire

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def round_trip(values: dict[str, Any]) -> dict[str, Any]:
    tree, tensors = encode_state(values, {})
    return decode_state(tree, tensors, CPU)[0]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(draw(st.sampled_from(DTYPES)))


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
    | tensors() | st.sampled_from(DTYPES)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_plain_values_and_tensors_come_back_equal(values: dict[str, Any]) -> None:
    assert same(round_trip(values), values)


def test_kwargs_types_come_back() -> None:
    tree, held = encode_state({"a": 1}, {"denoiser_input_fields": ["a"]})
    assert decode_state(tree, held, CPU)[1] == {"denoiser_input_fields": ["a"]}


def test_a_generator_goes_on_drawing_where_it_stopped() -> None:
    generator = torch.Generator("cpu").manual_seed(7)
    torch.rand(3, generator=generator)
    restored = round_trip({"generator": generator})["generator"]
    assert torch.equal(torch.rand(5, generator=restored), torch.rand(5, generator=generator))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_arrays_come_back_with_dtype_and_order(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype).T
    restored = round_trip({"a": array})["a"]
    assert restored.dtype == array.dtype
    assert np.array_equal(restored, array)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_come_back(mode: str) -> None:
    image = Image.effect_noise((5, 3), 50).convert(mode)
    restored = round_trip({"a": [image]})["a"][0]
    assert (restored.mode, restored.size, restored.tobytes()) == (mode, image.size, image.tobytes())


def test_numpy_scalars_and_sizes_become_plain() -> None:
    assert round_trip({"a": np.float32(0.5), "b": torch.Size([2, 3]), "c": np.int64(4)}) == {
        "a": 0.5, "b": (2, 3), "c": 4,
    }  # fmt: skip


def test_a_device_becomes_the_receivers() -> None:
    assert round_trip({"device": torch.device("cuda:3")}) == {"device": CPU}


def test_what_arrives_is_a_copy() -> None:
    sent = torch.zeros(3)
    tree, held = encode_state({"a": sent}, {})
    decode_state(tree, held, CPU)[0]["a"].fill_(1)
    assert not sent.any()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"scheduler": object()}, "'scheduler'.*builtins.object"),
        ({"a": [{"b": (1, decimal.Decimal(1))}]}, r"'a\[0\].b\[1\]'.*decimal.Decimal"),
        ({"a": {1: 2}}, "'a'.*mapping key 1"),
        ({"a": 2**64}, "'a'.*64 bits"),
        ({"a": np.array(["x"])}, "'a'.*<U1"),
        ({"a": torch.zeros(2).to_sparse()}, "'a'.*sparse"),
        ({"a": torch.zeros(2, device="meta")}, "'a'.*without plain data"),
        ({"a": Image.new("CMYK", (1, 1))}, "'a'.*CMYK"),
        ({"a": {1}}, "'a'.*builtins.set"),
        ({"a": b"raw"}, "'a'.*builtins.bytes"),
        ({"f": len}, "'f'.*builtin_function"),
    ],
)
def test_other_types_are_refused_by_name(value: dict[str, Any], named: str) -> None:
    with pytest.raises(StageError, match=named):
        encode_state(value, {})


STATE = ("values", "kwargs_types")


def tree_of(*items: wire.Value, keys: tuple[str, ...] = STATE) -> bytes:
    return wire.encode_value(wire.Dict(keys=keys, items=items))


EMPTY = wire.Dict(keys=(), items=())


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"\x00garbage",
        wire.encode_value(wire.Scalar(1)),
        tree_of(EMPTY, keys=("values",)),
        tree_of(EMPTY),
        tree_of(wire.List(()), EMPTY),
        tree_of(EMPTY, wire.Dict(keys=("a",), items=(wire.Scalar(1),))),
        tree_of(wire.Dict(keys=("a",), items=(wire.TensorRef(1),)), EMPTY),
        tree_of(wire.Dict(keys=("a",), items=(wire.TensorRef(-1),)), EMPTY),
        tree_of(wire.Dict(keys=("a",), items=(wire.DType("load"),)), EMPTY),
        tree_of(wire.Dict(keys=("a",), items=(wire.ImageRef("RGB", 0),)), EMPTY),
        tree_of(wire.Dict(keys=("a",), items=(wire.Generator("cpu", 0),)), EMPTY),
        tree_of(wire.Dict(keys=("a",), items=(wire.Generator("nowhere", 0),)), EMPTY),
    ],
)
def test_malformed_trees_are_refused(tree: bytes) -> None:
    with pytest.raises(WireError):
        decode_state(tree, [torch.zeros(2)], CPU)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_no_bytes_do_anything_but_decode_or_be_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode_state(data, [torch.zeros(2)], CPU)
