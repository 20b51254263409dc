"""The Task API's own words for adapters become the one field of the house."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.api.body import Body
from triptych.api.openapi_tasks import task_body
from triptych.api.task_orders import read_fields
from triptych.errors import BadRequest
from triptych.wire.adapters import Adapter, read_adapters
from triptych.wire.schema import Param, RequestSchema

WITH = RequestSchema(
    model="house",
    pipeline="WanPipeline",
    split="modular",
    task="text-to-video",
    output="video",
    params=(
        Param(name="prompt", type="string", required=True),
        Param(name="num_frames", type="integer", default=5),
        Param(name="fps", type="integer", default=8),
        Param(name="lora", type="adapters", nullable=True, choices=("fox", "snow")),
    ),
)


def read(**fields: Any) -> dict[str, Any]:
    body = Body(fields={"prompt": "a cat", **fields}, uploads={}, form=False)
    return dict(read_fields(WITH, body, "video").body.fields)


def test_name_and_strength_become_one_field() -> None:
    assert read(lora_name="fox")["lora"] == "fox"
    assert read(lora_name="fox", lora_strength=0.5)["lora"] == "fox:0.5"
    assert read(lora="fox:0.5")["lora"] == "fox:0.5"


def test_the_strength_is_that_of_every_name_without_one() -> None:
    assert read_adapters(read(lora_name="fox,snow", lora_strength=0.5)["lora"], ("fox", "snow")) == (
        Adapter("fox", 0.5),
        Adapter("snow", 0.5),
    )
    assert read(lora_name="fox:0.3, snow", lora_strength=1)["lora"] == "fox:0.3,snow:1.0"


@pytest.mark.parametrize("strength", [0.1 + 0.2, 1e-7, -1.2345678901234567e-5, 10, 0, "0.5"])
def test_any_strength_within_the_bounds_is_taken_as_it_is(strength: Any) -> None:
    (adapter,) = read_adapters(read(lora_name="fox", lora_strength=strength)["lora"], ("fox",))
    assert adapter.scale == float(strength)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"lora_name": "fox", "lora_strength": 10.5}, "lora_strength=10.5: must be within 10 of 0"),
        ({"lora_name": "fox", "lora_strength": "much"}, "lora_strength='much': must be a number"),
        ({"lora_name": "fox", "lora_strength": True}, "lora_strength=True: must be a number"),
        ({"lora_strength": 0.5}, "lora_strength=0.5: is of no use without lora_name"),
        ({"lora": "fox", "lora_strength": 0.5}, "lora_strength=0.5: is of no use without lora_name"),
    ],
)
def test_a_strength_that_could_not_be_kept_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint) as caught:
        read(**fields)
    assert caught.value.field == "lora_strength"


@pytest.mark.parametrize("name", ["", None])
def test_no_name_asks_for_nothing(name: str | None) -> None:
    assert "lora" not in read(lora_name=name, lora_strength=1.0)


def test_both_ways_at_once_are_one_too_many() -> None:
    with pytest.raises(BadRequest, match="lora and lora_name are both given"):
        read(lora="fox", lora_name="fox")


@pytest.mark.parametrize("form", [False, True])
def test_the_document_names_adapters_and_their_strength(form: bool) -> None:
    fields = task_body(WITH, "video", form=form)["properties"]
    assert "fox|snow" in str(fields["lora_name"])
    assert "'maximum': 10" in str(fields["lora_strength"])
