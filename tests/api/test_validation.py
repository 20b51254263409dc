"""Numbers against what a parameter declares: the nearest legal value, and the bounds that always hold."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.api.openapi_params import legal_values, property_of
from triptych.api.validation import bounded, check, nearest
from triptych.errors import BadRequest
from triptych.wire.schema import Param


@st.composite
def params(draw: st.DrawFn) -> Param:
    """An integer parameter with at least one legal value."""
    step = draw(st.integers(1, 20))
    rest = draw(st.integers(0, step - 1))
    low = draw(st.integers(1, 50))
    high = low + step + draw(st.integers(0, 200))
    return Param(name="x", type="integer", minimum=low, maximum=high, multiple_of=step, remainder=rest)


@given(params(), st.floats(-500, 500))
def test_the_nearest_value_is_legal_and_none_is_nearer(param: Param, value: float) -> None:
    legal = legal_values(param)
    assert legal
    found = nearest(param, value)
    assert found in legal
    assert abs(found - value) == min(abs(other - value) for other in legal)


@given(params(), st.integers(-500, 500))
def test_what_is_listed_as_legal_is_what_is_accepted(param: Param, value: int) -> None:
    legal = legal_values(param)
    assert legal is not None
    if value in legal:
        assert check(param, value, form=False) == value
        assert check(param, str(value), form=True) == value
    else:
        with pytest.raises(BadRequest, match=rf"x={value}: must be"):
            check(param, value, form=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_inference_steps", 10_000), ("height", 10**6), ("seed", -1), ("num_frames", 0), ("fps", 10**9)],
)
def test_a_model_without_bounds_gets_those_of_the_house(name: str, value: int) -> None:
    with pytest.raises(BadRequest, match=name):
        check(bounded(Param(name=name, type="integer")), value, form=False)


def test_a_models_own_bounds_win() -> None:
    param = bounded(Param(name="num_inference_steps", type="integer", minimum=0, maximum=5000))
    assert check(param, 4000, form=False) == 4000


ADAPTERS = Param(name="lora", type="adapters", nullable=True, choices=("fox", "snow"))


@pytest.mark.parametrize("text", ["fox", "snow:0.5,fox:-1"])
def test_adapters_are_named_from_the_list_of_the_model(text: str) -> None:
    assert check(ADAPTERS, text, form=False) == text


@pytest.mark.parametrize("value", ["bear", "/etc/fox.safetensors", "fox:much", "fox,fox", "", 7, ["fox"]])
def test_other_adapters_are_refused_with_the_list(value: object) -> None:
    with pytest.raises(BadRequest, match="lora") as refusal:
        check(ADAPTERS, value, form=False)
    if value == "bear":
        assert "'bear' is none of the adapters served here: fox, snow" in refusal.value.message


def test_the_document_describes_what_adapters_may_be() -> None:
    pattern = re.compile(property_of(ADAPTERS)["pattern"])
    names = ("fox", "snow", "foxy", "bear", "")
    plain = ("", ":1", ":-10", ":10.0", ":10.1", ":11", ":.5", ":0.", ":1.1234567", ":+0.5", ":", ":x", ":100")
    scales = (*plain, ":1e-07", ":1e1", ":.5E-2")
    ones = [f"{name}{scale}" for name in names for scale in scales]
    for text in (*ones, *(f"{one}{comma}{other}" for one in ones for comma in (",", " , ", ",,") for other in ones)):
        accepted = True
        try:
            check(ADAPTERS, text, form=False)
        except BadRequest:
            accepted = False
        assert bool(pattern.search(text)) is accepted, text
    assert pattern.fullmatch("fox:0.5")
    assert not pattern.fullmatch("bear")
