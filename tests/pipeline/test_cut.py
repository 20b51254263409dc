"""Where pipelines are cut and what crosses, on small blocks of every kind."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers.modular_pipelines.modular_pipeline import (
    AutoPipelineBlocks,
    ModularPipelineBlocks,
    SequentialPipelineBlocks,
)
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam, OutputParam

from triptych.errors import ModelError
from triptych.ids import Role
from triptych.pipeline.cut import cut


def block(reads: list[InputParam], writes: list[str]) -> type[ModularPipelineBlocks]:
    class Block(ModularPipelineBlocks):
        @property
        def inputs(self) -> list[InputParam]:
            return [InputParam(**vars(entry)) for entry in reads]

        @property
        def intermediate_outputs(self) -> list[OutputParam]:
            return [OutputParam(name) for name in writes]

        def __call__(self, components: Any, state: Any) -> Any:
            return components, state

    return Block


def needed(name: str) -> InputParam:
    return InputParam(name, required=True)


TextEncoder = block([needed("prompt")], ["embeds"])
ImageEncoder = block([needed("image")], ["image_latents"])
Denoise = block([needed("embeds"), InputParam("steps", default=8)], ["latents"])
Decode = block([needed("latents"), InputParam("mask")], ["images"])


def auto(blocks: list[type[ModularPipelineBlocks]], triggers: list[str | None]) -> type[AutoPipelineBlocks]:
    """Runs the first of ``blocks`` whose trigger is given; a trigger of None is the default."""
    names = [f"branch{i}" for i in range(len(blocks))]
    members = {"block_classes": blocks, "block_names": names, "block_trigger_inputs": triggers}
    return type("Auto", (AutoPipelineBlocks,), members)


AutoImage = auto([ImageEncoder], ["image"])
AutoDenoise = auto([block([needed("image_latents")], ["latents"]), Denoise], ["image_latents", None])


def pipeline(**blocks: type[ModularPipelineBlocks]) -> SequentialPipelineBlocks:
    return SequentialPipelineBlocks.from_blocks_dict(blocks)


def test_the_denoise_block_divides_the_rest() -> None:
    parts = cut("P", pipeline(first=TextEncoder, second=AutoImage, denoise=Denoise, decode=Decode, after=Decode)).parts
    assert {role: list(part.sub_blocks) for role, part in parts.items()} == {
        Role.ENCODER: ["first", "second"],
        Role.DENOISER: ["denoise"],
        Role.DECODER: ["decode", "after"],
    }


def test_needs_are_declared_inputs_and_triggers() -> None:
    found = cut("P", pipeline(text=TextEncoder, image=AutoImage, denoise=AutoDenoise, decode=Decode))
    assert {"embeds", "steps", "image_latents"} <= found.needs[Role.DENOISER].keys
    assert found.needs[Role.DECODER].keys == {"latents", "mask"}
    assert "mask" not in found.denoiser_writes
    assert "latents" in found.denoiser_writes


def test_needs_follow_kwargs_types() -> None:
    fields = InputParam(kwargs_type="denoiser_input_fields")
    denoise = block([needed("embeds"), fields], ["latents"])
    found = cut("P", pipeline(text=TextEncoder, denoise=denoise, decode=Decode)).needs[Role.DENOISER]
    assert found.of({"denoiser_input_fields": ["pooled"], "other": ["mask"]}) == {"embeds", "pooled"}


def test_an_image_that_can_be_left_out_is_not_asked_for() -> None:
    found = cut("P", pipeline(text=TextEncoder, image=AutoImage, denoise=AutoDenoise, decode=Decode))
    assert found.given == {"prompt"}
    assert list(found.executed[Role.ENCODER].sub_blocks) == ["text"]


def test_an_image_that_the_denoiser_cannot_do_without_is_asked_for() -> None:
    denoise = block([needed("embeds"), needed("image_latents")], ["latents"])
    found = cut("P", pipeline(text=TextEncoder, image=AutoImage, denoise=denoise, decode=Decode))
    assert found.given == {"prompt", "image"}
    assert list(found.executed[Role.ENCODER].sub_blocks) == ["text", "image"]


@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        ({"text": TextEncoder, "loop": Denoise}, r"P cannot be split: none of its blocks \['text', 'loop'\]"),
        ({"image": ImageEncoder, "denoise": Denoise}, "P cannot be served: its blocks take no prompt"),
        (
            {"text": TextEncoder, "denoise": block([needed("pose")], []), "decode": Decode},
            "P cannot be served: given prompt, its blocks still lack pose",
        ),
    ],
)
def test_what_cannot_be_served_is_an_error(blocks: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        cut("P", pipeline(**blocks))
