"""What requests may say to classic pipelines, read off their signatures and configs."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from PIL import Image

from triptych.errors import BadRequest, ConfigError
from triptych.pipeline.anatomy import anatomy_of
from triptych.pipeline.replay_schema import build_replay_schema, call_arguments
from triptych.pipeline.request import complete, with_defaults
from triptych.pipeline.schema import Settings
from triptych.wire.schema import RequestSchema


def diffusers_class(name: str) -> type[Any]:
    import diffusers

    return getattr(diffusers, name)


class Facts:
    """A pipeline reduced to the attributes and component configs that the schema asks for."""

    def __init__(self, components: dict[str, dict[str, Any]] | None = None, **attributes: Any) -> None:
        from diffusers.configuration_utils import FrozenDict

        self.__dict__.update(attributes)
        self.components: dict[str, Any] = {}
        for name, config in (components or {}).items():
            component = type("Component", (), {})()
            component.config = FrozenDict(config)
            setattr(self, name, component)
            self.components[name] = component


def schema_of(name: str, facts: Facts, settings: Settings | None = None) -> RequestSchema:
    return build_replay_schema(
        "model", {"_class_name": name}, facts, anatomy_of(diffusers_class(name)), settings or Settings()
    )


SVD = Facts({"unet": {"sample_size": 96, "num_frames": 14, "block_out_channels": (320, 640, 1280, 1280)}},
            vae_scale_factor=8)  # fmt: skip


def test_a_pipeline_without_a_prompt_has_no_prompt() -> None:
    schema = schema_of("StableVideoDiffusionPipeline", SVD)
    assert schema.param("prompt") is None
    assert (schema.task, schema.output, schema.split) == ("image-to-video", "video", "replay")
    image = schema.param("image")
    assert image is not None
    assert image.required


def test_defaults_come_from_the_signature_and_from_the_config_where_that_says_none() -> None:
    schema = schema_of("StableVideoDiffusionPipeline", SVD)
    found = {param.name: param.default for param in schema.params}
    assert (found["height"], found["width"], found["num_frames"], found["fps"]) == (576, 1024, 14, 7)
    assert (found["num_inference_steps"], found["guidance_scale"]) == (25, 3.0)


def test_a_models_settings_file_goes_first() -> None:
    settings = Settings(defaults={"height": 512, "num_inference_steps": 4}, limits={"max_frames": 25})
    schema = schema_of("StableVideoDiffusionPipeline", SVD, settings)
    found = {param.name: param for param in schema.params}
    assert (found["height"].default, found["num_inference_steps"].default, found["num_frames"].maximum) == (512, 4, 25)


@pytest.mark.parametrize(
    ("name", "facts", "multiple"),
    [
        ("StableVideoDiffusionPipeline", SVD, 64),
        (
            "StableDiffusionXLPipeline",
            Facts({"unet": {"block_out_channels": (320, 640, 1280)}}, vae_scale_factor=8),
            32,
        ),
        ("GlmImagePipeline", Facts({"transformer": {"patch_size": 2}}, vae_scale_factor=8), 32),
        ("MochiPipeline", Facts({"transformer": {"patch_size": 2}}, vae_spatial_scale_factor=8), 16),
        ("SanaPipeline", Facts({"transformer": {"patch_size": 1}}, vae_scale_factor=32), 64),
    ],
)
def test_sides_divide_by_what_the_model_needs(name: str, facts: Facts, multiple: int) -> None:
    for side in ("height", "width"):
        param = schema_of(name, facts).param(side)
        assert param is not None
        assert param.multiple_of == multiple
        assert isinstance(param.default, int)
        assert param.default % multiple == 0


def test_frames_follow_the_vaes_compression() -> None:
    param = schema_of("MochiPipeline", Facts(vae_spatial_scale_factor=8, vae_temporal_scale_factor=6)).param(
        "num_frames"
    )
    assert param is not None
    assert (param.multiple_of, param.remainder, param.default) == (6, 1, 19)


def test_a_count_that_the_pipeline_overrules_is_not_offered() -> None:
    facts = Facts({"transformer": {"sample_frames": 49}}, vae_scale_factor_spatial=8, vae_scale_factor_temporal=4)
    assert schema_of("CogVideoXPipeline", facts).param("n") is None
    assert schema_of("HunyuanVideoPipeline", facts).param("n") is not None
    frames = schema_of("CogVideoXPipeline", facts).param("num_frames")
    assert frames is not None
    assert frames.default == 49


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (100, 60), (200, 30, 30)).save(file, "png")
    return file.getvalue()


def test_parameters_become_arguments_under_the_pipelines_own_names() -> None:
    anatomy = anatomy_of(diffusers_class("StableVideoDiffusionPipeline"))
    request = {
        "image": {"blob": 0},
        "height": 64,
        "width": 128,
        "num_frames": 5,
        "guidance_scale": 2.5,
        "fps": 9,
        "seed": 11,
    }
    params = complete(schema_of("StableVideoDiffusionPipeline", SVD), request)
    arguments, seed = call_arguments(anatomy, params, [picture()])
    image = arguments.pop("image")
    assert (image.size, image.mode) == ((128, 64), "RGB")
    assert seed == 11
    assert arguments == {
        "height": 64, "width": 128, "num_frames": 5, "num_inference_steps": 25, "max_guidance_scale": 2.5, "fps": 9,
        "num_videos_per_prompt": 1, "output_type": "pt",
    }  # fmt: skip


def guided(name: str, **defaults: Any) -> RequestSchema:
    return with_defaults(schema_of(name, Facts(vae_scale_factor=8)), defaults)


def test_a_negative_prompt_is_refused_where_its_guidance_is_off_and_not_ignored() -> None:
    """HunyuanVideo's and Flux's guidance_scale is a condition of the model, next to which guidance proper is off."""
    for name in ("HunyuanVideoPipeline", "FluxImg2ImgPipeline"):
        schema, request = guided(name), {"prompt": "a cat", "image": {"blob": 0}, "negative_prompt": "dog"}
        request = {key: value for key, value in request.items() if schema.param(key) is not None}
        with pytest.raises(BadRequest, match="negative_prompt: is of no use without true_cfg_scale"):
            complete(schema, request)
        params = complete(schema, request | {"true_cfg_scale": 2.5})
        arguments, _ = call_arguments(anatomy_of(diffusers_class(name)), params, [picture()])
        assert (arguments["negative_prompt"], arguments["true_cfg_scale"]) == ("dog", 2.5)
        assert arguments["guidance_scale"] == params["guidance_scale"]
    with pytest.raises(ConfigError, match="--default negative_prompt: is of no use without true_cfg_scale"):
        guided("HunyuanVideoPipeline", negative_prompt="dog")
    assert complete(guided("HunyuanVideoPipeline", negative_prompt="dog", true_cfg_scale=4), {"prompt": "a cat"})


@pytest.mark.parametrize(("scale", "expected"), [(2.5, ""), (1.0, None), (None, None)])
@pytest.mark.parametrize("name", ["HunyuanVideoPipeline", "FluxImg2ImgPipeline"])
def test_guidance_that_is_asked_for_without_a_negative_prompt_steers_away_from_an_empty_one(
    name: str, scale: float | None, expected: str | None
) -> None:
    """Symptom: the scale was taken, and changed no byte, for the calls leave guidance out without one."""
    schema, request = guided(name), {"prompt": "a cat", "image": {"blob": 0}, "true_cfg_scale": scale}
    request = {key: value for key, value in request.items() if schema.param(key) is not None}
    arguments, _ = call_arguments(anatomy_of(diffusers_class(name)), complete(schema, request), [picture()])
    assert arguments["negative_prompt"] == expected


def test_guidance_that_is_on_by_itself_is_left_to_the_call() -> None:
    """Stock makes no use of it without a negative prompt, and a request that says nothing is as in stock."""
    name = "HunyuanSkyreelsImageToVideoPipeline"
    request = {"prompt": "a cat", "image": {"blob": 0}}
    arguments, _ = call_arguments(anatomy_of(diffusers_class(name)), complete(guided(name), request), [picture()])
    assert arguments["negative_prompt"] is None


def test_guidance_that_is_on_by_itself_can_be_turned_off() -> None:
    schema = guided("HunyuanSkyreelsImageToVideoPipeline")
    request = {"prompt": "a cat", "negative_prompt": "dog", "image": {"blob": 0}}
    assert complete(schema, request)["true_cfg_scale"] == 6.0
    anatomy = anatomy_of(diffusers_class("HunyuanSkyreelsImageToVideoPipeline"))
    arguments, _ = call_arguments(anatomy, complete(schema, request | {"true_cfg_scale": 1.0}), [picture()])
    assert arguments["true_cfg_scale"] == 1.0
    off = {param.name: param.default for param in guided("HunyuanSkyreelsImageToVideoPipeline", cfg=False).params}
    assert (off["true_cfg_scale"], off["guidance_scale"]) == (1.0, 1.0)


def test_a_scale_that_a_pipeline_never_reads_is_not_offered() -> None:
    """Chroma's signature has Flux's second scale, but its guidance goes by the first."""
    schema = guided("ChromaInpaintPipeline")
    assert schema.param("true_cfg_scale") is None
    assert schema.param("negative_prompt") is not None


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("MochiPipeline", 0.0),
        ("LDMTextToImagePipeline", 1.0),
        ("HunyuanVideoPipeline", 6.0),
        ("FluxImg2ImgPipeline", 7.0),
    ],
)
def test_guidance_turned_off_for_all_leaves_a_condition_of_the_model_alone(name: str, scale: float) -> None:
    found = {param.name: param.default for param in guided(name, cfg=False, guidance_scale_2=3.0).params}
    assert found["guidance_scale"] == scale
    assert found.get("true_cfg_scale") is None


def test_without_a_seed_every_request_draws_its_own() -> None:
    anatomy = anatomy_of(diffusers_class("MochiPipeline"))
    params = complete(schema_of("MochiPipeline", Facts()), {"prompt": "a cat"})
    seeds = {call_arguments(anatomy, params, ())[1] for _ in range(4)}
    assert len(seeds) == 4
    assert torch.Generator("cpu").manual_seed(max(seeds)).initial_seed() == max(seeds)


def test_a_wrong_value_names_its_field() -> None:
    with pytest.raises(BadRequest, match="height=100: must be a multiple of 64") as caught:
        complete(schema_of("StableVideoDiffusionPipeline", SVD), {"image": {"blob": 0}, "height": 100})
    assert caught.value.field == "height"


@pytest.mark.parametrize(("rotary", "least"), [(False, 226), (True, 1)])
def test_a_table_of_positions_for_the_text_fits_one_length(rotary: bool, least: int) -> None:
    """Symptom: CogVideoX-2B accepted any max_sequence_length and failed of all but one in the middle of a step."""
    transformer = {"max_text_seq_length": 226, "use_rotary_positional_embeddings": rotary}
    facts = Facts({"transformer": transformer | {"patch_size": 2, "sample_height": 60, "sample_width": 90}})
    length = schema_of("CogVideoXPipeline", facts).param("max_sequence_length")
    assert length is not None
    assert (length.minimum, length.default) == (least, 226)


def test_learned_positions_fit_one_size() -> None:
    transformer = {"max_text_seq_length": 226, "use_rotary_positional_embeddings": True, "patch_size": 2}
    transformer |= {"use_learned_positional_embeddings": True, "sample_height": 60, "sample_width": 90}
    schema = schema_of("CogVideoXImageToVideoPipeline", Facts({"transformer": transformer}))
    bounds = {param.name: (param.minimum, param.default, param.maximum) for param in schema.params}
    assert bounds["height"] == (480, 480, 480)
    assert bounds["width"] == (720, 720, 720)
    assert bounds["max_sequence_length"] == (226, 226, 226)
