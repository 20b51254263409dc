"""The Task API's own words for adapters become the one field of the house."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.api.body import Body
from triptych.api.task_orders import read_fields
from triptych.errors import BadRequest
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
        Param(name="lora", type="adapters", nullable=True, choices=("fox",)),
    ),
)


def read(**fields: Any) -> dict[str, Any]:
    body = Body(fields={"prompt": "a cat", **fields}, uploads={}, form=False)
    return dict(read_fields(WITH, body, "video").body.fields)


def test_name_and_strength_become_one_field() -> None:
    assert read(lora_name="fox")["lora"] == "fox"
    assert read(lora_name="fox", lora_strength=0.5)["lora"] == "fox:0.5"
    assert read(lora="fox:0.5")["lora"] == "fox:0.5"


@pytest.mark.parametrize("name", ["", None])
def test_no_name_asks_for_nothing(name: str | None) -> None:
    assert "lora" not in read(lora_name=name, lora_strength=1.0)


def test_both_ways_at_once_are_one_too_many() -> None:
    with pytest.raises(BadRequest, match="lora and lora_name are both given"):
        read(lora="fox", lora_name="fox")
