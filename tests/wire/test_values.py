"""The value tree survives the trip, and nothing else decodes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import WireError
from triptych.wire import values as v

LEAVES = st.one_of(
    st.builds(v.Scalar, st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)),
    st.builds(v.Scalar, st.text(max_size=8)),
    st.builds(v.TensorRef, st.integers(0, 9)),
    st.builds(v.ArrayRef, st.integers(0, 9)),
    st.builds(v.ImageRef, st.sampled_from(["L", "RGB"]), st.integers(0, 9)),
    st.builds(v.Generator, st.sampled_from(["cpu", "cuda"]), st.integers(0, 9)),
    st.builds(v.DType, st.just("bfloat16")),
    st.just(v.Device()),
)


def _dict(items: dict[str, v.Value]) -> v.Dict:
    return v.Dict(tuple(items), tuple(items.values()))


TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: v.List(tuple(items))),
        st.lists(inner, max_size=3).map(lambda items: v.Tuple(tuple(items))),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(_dict),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_a_tree_survives_the_trip(tree: v.Value) -> None:
    assert v.decode_value(v.encode_value(tree)) == tree


def test_a_list_stays_a_list_and_a_tuple_a_tuple() -> None:
    tree = v.Tuple((v.List((v.Scalar(1),)), v.Tuple(())))
    decoded = v.decode_value(v.encode_value(tree))
    assert isinstance(decoded, v.Tuple)
    assert isinstance(decoded.items[0], v.List)
    assert isinstance(decoded.items[1], v.Tuple)


@pytest.mark.parametrize(
    "raw",
    [["?", 1], ["s"], ["s", 1, 2], ["s", [1]], ["t", "one"], [], {}, 7, ["l", [["?", 1]]], ["m", ["a"]]],
    ids=repr,
)
def test_what_is_no_node_is_refused(raw: object) -> None:
    with pytest.raises(WireError):
        v.decode_value(msgspec.msgpack.encode(raw))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_noise_is_a_wire_error(data: bytes) -> None:
    try:
        v.decode_value(data)
    except WireError:
        return
    assert v.decode_value(data) == v.decode_value(v.encode_value(v.decode_value(data)))


def test_endless_nesting_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        v.decode_value(b"\x92\xa1l\x91" * 100_000)
