"""Fields that ask for nothing are accepted, and the same fields refused by name where they ask for something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from triptych.api.body import Body
from triptych.api.openapi import request_body
from triptych.api.orders import read_order
from triptych.errors import BadRequest
from triptych.wire.schema import Param, RequestSchema

PAINTER = RequestSchema(
    model="painter", pipeline="FluxPipeline", split="modular", task="text-to-image", output="image",
    params=(
        Param(name="prompt", type="string", required=True),
        Param(name="height", type="integer", default=64, minimum=16, maximum=256, multiple_of=16),
        Param(name="width", type="integer", default=96, minimum=16, maximum=256, multiple_of=16),
    ),
)  # fmt: skip
SIZELESS = RequestSchema(
    model="painter", pipeline="A", split="replay", task="text-to-image", output="image", params=PAINTER.params[:1]
)

PLAIN = read_order(PAINTER, Body(fields={"prompt": "a"}), "image")


@pytest.fixture
def sdk(house: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "auto"},
        {"quality": "auto"},
        {"quality": "standard"},
        {"background": "auto"},
        {"moderation": "low"},
        {"input_fidelity": "low"},
        {"output_compression": 100},
        {"output_compression": 100.0},
        {"partial_images": 0},
        {"stream": False},
        {"style": None},
        {"user": "somebody"},
        {"user": ""},
    ],
)
def test_a_default_that_is_written_out_changes_nothing(fields: dict[str, Any]) -> None:
    assert read_order(PAINTER, Body(fields={"prompt": "a", **fields}), "image") == PLAIN
    form = {name: str(value).lower() for name, value in fields.items() if not isinstance(value, float | None)}
    assert read_order(PAINTER, Body(fields={"prompt": "a", **form}, form=True), "image") == PLAIN


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quality": "hd"},
            "quality='hd': must be 'auto' or 'standard' or left out: model 'painter' is served without",
        ),
        ({"style": "vivid"}, "style='vivid': must be left out"),
        ({"background": "transparent"}, "background='transparent': must be 'auto' or left out"),
        ({"stream": True}, "stream=True: must be false or left out"),
        ({"stream": 0}, "stream=0: must be false"),
        ({"partial_images": 2}, "partial_images=2: must be 0 or left out"),
        ({"partial_images": False}, "partial_images=False: must be 0"),
        ({"output_compression": 50}, "output_compression=50: must be 100"),
        ({"user": 5}, "user=5: must be a string"),
        ({"user": "u" * 600}, "user: has 600 characters"),
        ({"size": "auto", "width": 64}, "size='auto' and width are both given"),
    ],
)
def test_what_asks_for_something_that_is_not_here_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        read_order(PAINTER, Body(fields={"prompt": "a", **fields}), "image")
    assert caught.value.field == next(iter(fields))


def test_a_parameter_of_the_model_is_not_taken_for_one_of_them() -> None:
    params = (*PAINTER.params, Param(name="style", type="string", choices=("oil", "ink")))
    styled = RequestSchema(model="p", pipeline="P", split="replay", task="text-to-image", output="image", params=params)
    assert read_order(styled, Body(fields={"prompt": "a", "style": "ink"}), "image").params["style"] == "ink"
    assert request_body(styled, "image", form=True)["properties"]["style"]["enum"] == ["oil", "ink"]


def test_a_model_of_one_size_takes_auto_for_it() -> None:
    body = Body(fields={"prompt": "a", "size": "auto"})
    assert read_order(SIZELESS, body, "image") == read_order(SIZELESS, Body(fields={"prompt": "a"}), "image")


def test_videos_have_none_of_the_fields_of_images() -> None:
    video = RequestSchema(model="p", pipeline="P", split="replay", task="t", output="video", params=PAINTER.params)
    assert read_order(video, Body(fields={"prompt": "a", "size": "auto"}), "video").params["width"] == 96
    with pytest.raises(BadRequest, match="'quality' is not a field"):
        read_order(video, Body(fields={"prompt": "a", "quality": "auto"}), "video")


def test_the_sdk_may_say_all_of_its_defaults(sdk: openai.OpenAI, house: Any, picture: bytes) -> None:
    made = sdk.images.generate(
        prompt="a cat", n=1, size="auto", quality="auto", background="auto", moderation="auto", user="somebody",
        output_compression=100, output_format="png", response_format="b64_json", stream=False, partial_images=0,
    )  # fmt: skip
    assert made.size == "96x64"
    edited = sdk.images.edit(
        prompt="a cat", image=("a.png", picture), size="auto", quality="auto", background="auto", user="somebody",
        input_fidelity="low", output_compression=100, output_format="png", stream=False, response_format="b64_json",
    )  # fmt: skip
    assert edited.size == "96x64"
    assert house.seen[-1][1] == (picture,)
    with pytest.raises(openai.BadRequestError, match="quality='high': must be 'auto' or 'standard'") as caught:
        sdk.images.generate(prompt="a cat", quality="high")
    assert caught.value.param == "quality"
