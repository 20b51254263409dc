"""Other tasks of the same weights, as Diffusers' automatic pipelines list them."""

from __future__ import annotations

import pytest

from triptych.errors import ModelError
from triptych.pipeline.capabilities import for_task
from triptych.pipeline.tasks import automatic_pipelines, sibling


@pytest.mark.parametrize(
    ("pipeline", "task", "expected"),
    [
        ("FluxPipeline", "image-to-image", "FluxImg2ImgPipeline"),
        ("FluxPipeline", "inpainting", "FluxInpaintPipeline"),
        ("FluxInpaintPipeline", "text-to-image", "FluxPipeline"),
        ("StableDiffusionXLPipeline", "inpainting", "StableDiffusionXLInpaintPipeline"),
        ("FluxPipeline", "text-to-image", "FluxPipeline"),
        ("LTX2Pipeline", "image-to-video", "LTX2ImageToVideoPipeline"),
        ("LTX2Pipeline", "inpainting", None),
        ("MochiPipeline", "inpainting", None),
        ("NoSuchPipeline", "inpainting", None),
    ],
)
def test_the_sibling_of_a_pipeline(pipeline: str, task: str, expected: str | None) -> None:
    assert sibling(pipeline, task) == expected


def test_the_lists_are_diffusers_own() -> None:
    assert automatic_pipelines()["AUTO_TEXT2IMAGE_PIPELINES_MAPPING"]["flux"] == "FluxPipeline"


def test_an_index_for_another_task_keeps_its_components() -> None:
    index = {"_class_name": "QwenImagePipeline", "vae": ["diffusers", "AutoencoderKLQwenImage"]}
    assert for_task(index, None) is index
    assert for_task(index, "inpainting") == index | {"_class_name": "QwenImageInpaintPipeline"}


def test_a_task_that_nothing_does_is_refused_with_those_that_can_be() -> None:
    index = {"_class_name": "FluxPipeline"}
    with pytest.raises(ModelError, match=r"cannot be served for text-to-video, only for text-to-image, image-to-image"):
        for_task(index, "text-to-video")


@pytest.mark.parametrize(
    ("pipeline", "task", "instead"),
    [
        ("HeliosPipeline", "text-to-image", "text-to-video, image-to-video"),
        ("StableDiffusionXLControlNetPipeline", "text-to-image", "image-to-image, inpainting"),
    ],
)
def test_a_task_that_a_class_is_listed_for_but_does_not_do_is_refused(pipeline: str, task: str, instead: str) -> None:
    """Diffusers lists a class for all that its one signature can be made to do."""
    index = {"_class_name": pipeline}
    with pytest.raises(ModelError, match=f"{pipeline} cannot be served for {task}, only for {instead}$"):
        for_task(index, task)


def test_a_task_that_no_list_has_a_class_for_may_be_its_own() -> None:
    index = {"_class_name": "HeliosPipeline"}
    assert for_task(index, "text-to-video") == index
    assert for_task(index, "image-to-video") == index


def test_a_class_that_cannot_be_split_is_left_to_say_why() -> None:
    index = {"_class_name": "KandinskyPipeline"}
    assert for_task(index, "inpainting")["_class_name"] == "KandinskyInpaintCombinedPipeline"
