"""Strategies for everything that can travel, derived from the types themselves so that new messages are covered."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from triptych.ids import Role

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type that the wire uses."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    simple = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=12),
        bytes: st.binary(max_size=12),
        type(None): st.none(),
        Any: PLAIN,
        Role: st.sampled_from(Role),
    }
    if hasattr(kind, "__supertype__"):
        return strategy(kind.__supertype__)
    if kind in simple:
        return simple[kind]
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([strategy(arg) for arg in args])
    if origin is tuple:
        return st.lists(strategy(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=3)
    assert isinstance(kind, type), kind
    assert issubclass(kind, msgspec.Struct), kind
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: strategy(hints[field.name]) for field in msgspec.structs.fields(kind)})


@pytest.fixture(scope="session")
def strategy_of() -> Any:
    return strategy
