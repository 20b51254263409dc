"""What a request may say about adapters."""

from __future__ import annotations

import pytest

from triptych.wire.adapters import Adapter, read_adapters

KNOWN = ("fox", "snow-2")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fox", [Adapter("fox", None)]),
        ("fox:0.5", [Adapter("fox", 0.5)]),
        ("fox:0.30000000000000004,snow-2:1e-07", [Adapter("fox", 0.1 + 0.2), Adapter("snow-2", 1e-7)]),
        ("snow-2:-1, fox:.25", [Adapter("snow-2", -1.0), Adapter("fox", 0.25)]),
    ],
)
def test_names_and_scales_are_read_in_their_order(text: str, found: list[Adapter]) -> None:
    assert list(read_adapters(text, KNOWN)) == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bear", "'bear' is none of the adapters served here: fox, snow-2"),
        ("../fox.safetensors", "none of the adapters"),
        ("", "'' is none"),
        ("fox,fox:0.5", "fox is named twice"),
        ("fox:", "'' is not a scale of fox"),
        ("fox:nan", "'nan' is not a scale of fox"),
        ("fox:1e2", "'1e2' is not a scale of fox"),
        ("fox:1_0", "'1_0' is not a scale of fox"),
        ("fox:11", "'11' is not a scale of fox: a number within 10 of 0"),
    ],
)
def test_anything_else_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_adapters(text, KNOWN)
