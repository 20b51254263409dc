"""What a request of each model may say: pictures under clients' names, and models that take no prompt."""

from __future__ import annotations

import io

import msgspec
import pytest
from PIL import Image

from triptych.api.body import Body
from triptych.api.openapi import request_body
from triptych.api.openapi_tasks import task_body
from triptych.api.orders import read_order
from triptych.api.task_orders import read_fields
from triptych.errors import BadRequest
from triptych.wire.schema import Param, RequestSchema

SIZE = (
    Param(name="height", type="integer", default=64, minimum=16, maximum=256, multiple_of=16),
    Param(name="width", type="integer", default=96, minimum=16, maximum=256, multiple_of=16),
)
IMAGE = Param(name="image", type="image", required=True)
INPAINT = RequestSchema(
    model="painter", pipeline="StableDiffusionXLInpaintPipeline", split="replay", task="inpainting", output="image",
    params=(
        Param(name="prompt", type="string", required=True), IMAGE,
        Param(name="mask_image", type="image", required=True),
        Param(name="strength", type="number", default=0.8, minimum=0.0, maximum=1.0),
        Param(name="num_inference_steps", type="integer", default=4, minimum=1, maximum=100), *SIZE,
    ),
)  # fmt: skip
PAIR = RequestSchema(
    model="filmer", pipeline="WanImageToVideoPipeline", split="modular", task="image-to-video", output="video",
    params=(
        Param(name="prompt", type="string", required=True), IMAGE,
        Param(name="last_image", type="image", nullable=True), *SIZE,
        Param(name="num_frames", type="integer", default=17, minimum=1, maximum=65, multiple_of=4, remainder=1),
        Param(name="fps", type="integer", default=8, minimum=1, maximum=120),
    ),
)  # fmt: skip
WORDLESS = RequestSchema(
    model="svd", pipeline="StableVideoDiffusionPipeline", split="replay", task="image-to-video", output="video",
    params=(IMAGE, *SIZE, *PAIR.params[-2:]),
)  # fmt: skip


def png(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


FIRST, SECOND = png(1), png(2)


@pytest.mark.parametrize("name", ["mask", "mask_image"])
def test_an_edit_carries_a_mask(name: str) -> None:
    body = Body(fields={"prompt": "a cat", "strength": "0.5"}, uploads={"image": [FIRST], name: [SECOND]}, form=True)
    order = read_order(INPAINT, body, "image")
    assert [order.images[order.params[name]["blob"]] for name in ("image", "mask_image")] == [FIRST, SECOND]
    assert order.params["strength"] == 0.5


def test_a_size_has_no_default_beside_a_picture_that_it_follows() -> None:
    sides = tuple(msgspec.structs.replace(side, nullable=True, unless="image") for side in SIZE)
    image = Param(name="image", type="images", nullable=True, max_length=2)
    schema = msgspec.structs.replace(INPAINT, params=(INPAINT.params[0], image, *sides))
    alone = read_order(schema, Body(fields={"prompt": "a"}, uploads={}), "image")
    assert (alone.params["width"], alone.params["height"], alone.size) == (96, 64, "96x64")
    beside = read_order(schema, Body(fields={"prompt": "a"}, uploads={"image": [FIRST]}), "image")
    assert not {"width", "height"} & beside.params.keys()
    asked = read_order(schema, Body(fields={"prompt": "a", "size": "32x48"}, uploads={"image": [FIRST]}), "image")
    assert (asked.params["width"], asked.params["height"]) == (32, 48)


@pytest.mark.parametrize("name", ["last_frame", "last_image"])
def test_a_video_carries_its_last_frame(name: str) -> None:
    uploads = {name: [SECOND], "input_reference": [FIRST]}
    order = read_order(PAIR, Body(fields={"prompt": "a cat"}, uploads=uploads), "video")
    assert [order.images[order.params[name]["blob"]] for name in ("image", "last_image")] == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("schema", "fields", "uploads", "message"),
    [
        (PAIR, {"prompt": "a"}, {"image": [FIRST], "mask": [SECOND]}, r"mask: model 'filmer' .* takes no mask"),
        (PAIR, {"prompt": "a", "strength": 0.5}, {"image": [FIRST]}, r"strength: model 'filmer' .* takes no strength"),
        (WORDLESS, {}, {"image": [FIRST], "last_frame": [SECOND]}, r"last_frame: model 'svd' .* takes no last frame"),
        (WORDLESS, {"prompt": "a"}, {"image": [FIRST]}, r"prompt: model 'svd' \(image-to-video\) takes no prompt"),
        (WORDLESS, {}, {}, "image: is required"),
        (PAIR, {"prompt": "a"}, {"image": [FIRST], "last_image": [FIRST], "last_frame": [SECOND]}, "given twice"),
    ],
)
def test_what_a_model_does_not_take_is_refused_by_name(
    schema: RequestSchema, fields: dict[str, object], uploads: dict[str, list[bytes]], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        read_order(schema, Body(fields=dict(fields), uploads=uploads), "video")


def test_the_longest_duration_that_a_refusal_names_is_taken() -> None:
    """Symptom: at 24 fps it named 2.70833 seconds for 65 frames, which is a little more."""
    for fps in range(1, 121):
        fields: dict[str, object] = {"prompt": "a", "fps": fps}
        with pytest.raises(BadRequest, match="at most") as caught:
            read_order(PAIR, Body(fields=fields | {"seconds": 1000}, uploads={"image": [FIRST]}), "video")
        named = float(caught.value.message.partition("at most ")[2].split()[0])
        order = read_order(PAIR, Body(fields=fields | {"seconds": named}, uploads={"image": [FIRST]}), "video")
        assert order.params["num_frames"] == 65


def test_a_strength_that_leaves_no_step_is_refused() -> None:
    body = Body(fields={"prompt": "a", "strength": 0.2}, uploads={"image": [FIRST], "mask": [SECOND]})
    with pytest.raises(BadRequest, match=r"strength=0.2: must be at least 0.25 at 4 steps"):
        read_order(INPAINT, body, "image")
    assert read_order(INPAINT, Body(fields=body.fields | {"num_inference_steps": 5}, uploads=body.uploads), "image")


def test_a_mask_is_required_where_the_model_needs_one() -> None:
    with pytest.raises(BadRequest, match="mask_image: is required"):
        read_order(INPAINT, Body(fields={"prompt": "a"}, uploads={"image": [FIRST]}), "image")


def test_a_model_without_prompt_is_asked_without_one() -> None:
    order = read_order(WORDLESS, Body(fields={}, uploads={"input_reference": [FIRST]}), "video")
    assert order.params == {
        "image": {"blob": 0}, "height": 64, "width": 96, "num_frames": 17, "fps": 8, "output_format": "mp4",
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["", None])
def test_an_empty_prompt_is_none_for_a_model_that_takes_none(prompt: str | None) -> None:
    body = Body(fields={"prompt": prompt}, uploads={"image": [FIRST]})
    assert "prompt" not in read_order(WORDLESS, body, "video").params
    spoken = read_fields(WORDLESS, Body(fields={"prompt": prompt}, uploads={"image_file": [FIRST]}), "video")
    assert spoken.body.fields == {}
    assert spoken.digest == read_fields(WORDLESS, Body(fields={}, uploads={"image_file": [FIRST]}), "video").digest
    with pytest.raises(BadRequest, match="prompt"):
        read_order(PAIR, body, "video")  # which needs one


def test_a_model_that_goes_by_its_picture_anyway_is_told_no_size() -> None:
    """Qwen-Image-Edit and its kin have no size of their own."""
    params = tuple(msgspec.structs.replace(p, default=None, nullable=True) if p in SIZE else p for p in PAIR.params)
    schema = msgspec.structs.replace(PAIR, params=params)
    body = Body(fields={"prompt": "a"}, uploads={"image": [FIRST]})
    assert "height" not in read_order(schema, body, "video", sizes={"image": [(8, 8)]}).params
    assert read_order(PAIR, body, "video", sizes={"image": [(8, 8)]}).params["height"] == 80


def test_the_task_api_has_its_own_names_for_pictures() -> None:
    uploads = {"image_file": [FIRST], "last_frame_file": [SECOND]}
    fields = read_fields(PAIR, Body(fields={"prompt": "a"}, uploads=uploads, form=True), "video")
    assert fields.body.uploads == {"image": [FIRST], "last_image": [SECOND]}
    fields = read_fields(
        INPAINT, Body(fields={"prompt": "a", "image_path": "a.png", "image_mask_path": "b.png"}), "image"
    )
    assert (fields.body.fields["image"], fields.body.fields["mask_image"]) == ("a.png", "b.png")
    with pytest.raises(BadRequest, match=r"image_mask_path: model 'filmer' .* takes no mask"):
        read_fields(PAIR, Body(fields={"prompt": "a", "image_mask_path": "b.png"}), "video")
    assert read_fields(PAIR, Body(fields={"prompt": "a", "image_mask_path": ""}), "video").body.fields == {
        "prompt": "a"
    }


def test_the_document_names_them_too() -> None:
    assert {"mask", "mask_image"} <= request_body(INPAINT, "image", form=True)["properties"].keys()
    assert {"last_frame", "last_image"} <= request_body(PAIR, "video", form=False)["properties"].keys()
    for body in (request_body(WORDLESS, "video", form=True), task_body(WORDLESS, "video", form=True)):
        assert body["properties"]["prompt"]["enum"] == [""]
        assert "prompt" not in body["required"]
    assert {"image_path", "image_mask_path"} <= set(task_body(INPAINT, "image", form=False)["required"])
    assert "last_frame_file" in task_body(PAIR, "video", form=True)["properties"]
