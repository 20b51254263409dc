"""What requests may say: declared inputs, the model's config, its settings file and the presets."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from triptych.config import ModelConfig, Task
from triptych.core.cost import staged_bytes
from triptych.errors import BadRequest, ConfigError, ModelError
from triptych.ids import ROLES, Role
from triptych.launch.sources import settle
from triptych.models import EMBEDDED
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.request import complete, with_defaults
from triptych.wire.schema import RequestSchema

from .qwen_checkpoints import QWEN_BUILDERS
from .wan_checkpoints import WAN_BUILDERS

Get = Callable[[str], ModularRolePipeline]

CONFIGS = Path(__file__).parents[2] / "configs"


def load(path: Path | str, role: Role = Role.DECODER) -> ModularRolePipeline:
    return load_pipeline(ModelConfig(path=str(path), device="cpu"), (role,), "cpu")


@pytest.fixture(scope="module")
def loaded(checkpoint: Callable[[str], Path]) -> Get:
    made: dict[str, ModularRolePipeline] = {}

    def get(family: str) -> ModularRolePipeline:
        if family not in made:
            made[family] = load("tiny" if family == "tiny" else checkpoint(family), Role.ENCODER)
        return made[family]

    return get


def names(schema: RequestSchema) -> list[str]:
    return [param.name for param in schema.params]


def test_every_role_announces_the_same_schema(checkpoint: Callable[[str], Path]) -> None:
    schemas = [load(checkpoint("wan_t2v"), role).schema for role in ROLES]
    assert schemas[0] == schemas[1] == schemas[2]


def test_the_embedded_model_takes_its_values_from_its_settings_file(loaded: Get) -> None:
    schema = loaded("tiny").schema
    assert (schema.model, schema.pipeline, schema.split) == ("tiny", "WanPipeline", "modular")
    assert (schema.task, schema.output) == ("text-to-video", "video")
    settings = json.loads((EMBEDDED["tiny"] / "triptych.json").read_text())
    defaults = {param.name: param.default for param in schema.params}
    assert {name: defaults[name] for name in settings["defaults"]} == settings["defaults"]
    limits = {param.name: param.maximum for param in schema.params}
    assert limits["height"] == limits["width"] == settings["limits"]["max_side"]
    assert limits["num_frames"] == settings["limits"]["max_frames"]
    assert limits["num_inference_steps"] == settings["limits"]["max_steps"]
    assert limits["max_sequence_length"] == settings["limits"]["max_sequence_length"]


def test_wan_without_settings_has_the_published_values_within_its_position_table(loaded: Get) -> None:
    schema = loaded("wan_t2v").schema
    assert names(schema) == [
        "prompt", "negative_prompt", "height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale",
        "flow_shift", "seed", "max_sequence_length", "n", "output_format",
    ]  # fmt: skip
    values = {param.name: param for param in schema.params}
    # rope_max_seq_len is 32: 32 patches of two latents of eight pixels, 32 latent frames of four. The published width
    # of 832 does not fit that.
    assert [values[name].default for name in ("height", "width", "num_frames", "fps")] == [480, 512, 81, 16]
    assert [values[name].default for name in ("num_inference_steps", "guidance_scale")] == [50, 5.0]
    assert (values["width"].maximum, values["width"].multiple_of) == (512, 16)
    assert (values["num_frames"].maximum, values["num_frames"].multiple_of, values["num_frames"].remainder) == (
        125,
        4,
        1,
    )
    assert values["output_format"].choices == ("mp4", "png", "jpeg", "webp")


def test_the_default_size_lies_within_the_limits(loaded: Get) -> None:
    for family in ("tiny", "wan_t2v", "qwen_t2i", "flux", "z_image", "wan_i2v", "wan22_t2v"):
        for param in loaded(family).schema.params:
            if isinstance(param.default, (int, float)) and param.maximum is not None:
                assert param.minimum is not None
                assert param.minimum <= param.default <= param.maximum, (family, param)
            if param.multiple_of is not None and isinstance(param.default, int):
                assert (param.default - param.remainder) % param.multiple_of == 0, (family, param)


def test_image_models_have_no_frames(loaded: Get) -> None:
    schema = loaded("qwen_t2i").schema
    assert (schema.task, schema.output) == ("text-to-image", "image")
    assert {"num_frames", "fps"}.isdisjoint(names(schema))
    values = {param.name: param for param in schema.params}
    assert values["output_format"].choices == ("png", "jpeg", "webp")
    assert values["height"].multiple_of == 16
    assert values["num_inference_steps"].minimum == 2, "one step of a schedule with a terminal shift divides by zero"


def test_flux_takes_no_negative_prompt(loaded: Get) -> None:
    assert "negative_prompt" not in names(loaded("flux").schema)


def test_z_image_counts_guidance_from_zero(loaded: Get) -> None:
    guidance = loaded("z_image").schema.param("guidance_scale")
    assert guidance is not None
    assert (guidance.minimum, guidance.default) == (0.0, 0.0)


def test_image_to_video_needs_an_image_and_a_fixed_text_length(loaded: Get) -> None:
    schema = loaded("wan_i2v").schema
    assert schema.task == "image-to-video"
    image, length = schema.param("image"), schema.param("max_sequence_length")
    assert image is not None
    assert length is not None
    assert image.required
    assert (length.minimum, length.default, length.maximum) == (512, 512, 512)
    count = schema.param("n")
    assert count is not None
    assert count.maximum == 1


def test_what_an_encoder_makes_of_a_picture_is_foretold(loaded: Get) -> None:
    schema = loaded("wan_i2v").schema
    assert schema.handoff is not None
    assert (schema.handoff.channels, schema.handoff.condition_channels) == (16, 20)
    params = {"prompt": "a", "height": 64, "width": 64, "num_frames": 9, "image": {"blob": 0}}
    picture = io.BytesIO()
    Image.new("RGB", (64, 64)).save(picture, "PNG")
    result = loaded("wan_i2v").start(Role.ENCODER, params, [], (picture.getvalue(),)).advance()
    assert result is not None
    sizes = [tensor.nbytes for output in result.outputs for tensor in output.tensors]
    assert staged_bytes(schema, params, Role.ENCODER) in sizes


def test_the_latents_that_cross_are_described(loaded: Get) -> None:
    handoff = loaded("wan_t2v").schema.handoff
    assert handoff is not None
    assert (handoff.channels, handoff.spatial, handoff.temporal) == (16, 8, 4)
    assert handoff.condition_channels == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("{", "not JSON"),
        ("[]", "entries defaults and limits"),
        ('{"default": {}}', "entries defaults and limits"),
        ('{"limits": {"max_size": 3}}', "limits has no entry 'max_size'"),
        ('{"defaults": {"height": "tall"}}', "defaults.height must be a number"),
        ('{"defaults": {"height": true}}', "defaults.height must be a number"),
        ('{"defaults": []}', "defaults must be an object"),
    ],
)
def test_a_wrong_settings_file_is_an_error(
    checkpoint: Callable[[str], Path], tmp_path: Path, settings: str, named: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("wan_t2v"), folder)
    (folder / "triptych.json").write_text(settings)
    with pytest.raises(ModelError, match=named):
        load(folder)


VALID: dict[str, Any] = {"prompt": "a cat", "height": 32, "width": 32, "num_frames": 5}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"strength": 0.5}, "strength"),
        ({"latents": 1}, "latents"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x" * 40_000}, "prompt"),
        ({"negative_prompt": ["a"]}, "negative_prompt"),
        ({"height": 40}, "height"),
        ({"height": 0}, "height"),
        ({"height": "32"}, "height"),
        ({"height": True}, "height"),
        ({"width": 1024}, "width"),
        ({"num_frames": 6}, "num_frames"),
        ({"num_frames": -3}, "num_frames"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 2.0}, "num_inference_steps"),
        ({"guidance_scale": 0.5}, "guidance_scale"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 99}, "n"),
        ({"max_sequence_length": None}, "max_sequence_length"),
        ({"output_format": "gif"}, "output_format"),
        ({"fps": 0}, "fps"),
    ],
)
@pytest.mark.parametrize("role", [Role.ENCODER])
def test_what_the_schema_does_not_allow_is_refused_by_name(
    loaded: Get, change: dict[str, Any], field: str, role: Role
) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        loaded("wan_t2v").start(role, VALID | change, [], ())
    assert caught.value.field == field


def test_a_request_without_a_prompt_is_refused(loaded: Get) -> None:
    with pytest.raises(BadRequest, match="prompt is required"):
        loaded("wan_t2v").start(Role.ENCODER, {}, [], ())


@pytest.mark.parametrize("image", [{"blob": 1}, {"blob": "0"}, {"blob": 0}])
def test_a_wrong_image_is_refused(loaded: Get, image: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="image: ") as caught:
        loaded("wan_i2v").start(Role.ENCODER, VALID | {"image": image}, [], [b"not a picture"])
    assert caught.value.field == "image"


def with_default(**defaults: bool | int | float | str) -> RequestSchema:
    model = ModelConfig(path="tiny", device="cpu", defaults=defaults)
    return load_pipeline(model, (Role.ENCODER,), "cpu").schema


def test_defaults_of_the_launch_stand_in_the_schema() -> None:
    schema = with_default(num_inference_steps=7, flow_shift=2, negative_prompt="blurred")
    found = {param.name: param.default for param in schema.params}
    assert (found["num_inference_steps"], found["flow_shift"], found["negative_prompt"]) == (7, 2, "blurred")
    assert found["guidance_scale"] == 4.0, "the model's own"


@pytest.mark.parametrize(("family", "scale"), [("wan_t2v", 1.0), ("z_image", 0.0), ("flux", 3.5)])
def test_guidance_can_be_off_where_a_request_does_not_ask_for_it(loaded: Get, family: str, scale: float) -> None:
    """Z-Image's own scale begins at 0; Flux has a condition of the model under that name, which stays."""
    schema = with_defaults(loaded(family).schema, {"cfg": False, "guidance_scale_2": 3.0})
    found = schema.param("guidance_scale")
    assert found is not None
    assert found.default == scale
    again = with_defaults(loaded(family).schema, {"cfg": True, "guidance_scale": 7.0}).param("guidance_scale")
    assert again is not None
    assert again.default == 7.0


@pytest.mark.parametrize(
    ("config", "build", "steps"),
    [
        ("wan-t2v-distilled", WAN_BUILDERS["wan_distilled"], 4),
        ("wan-t2v-distilled", WAN_BUILDERS["wan22_distilled"], 4),
        ("qwen-image-distilled", QWEN_BUILDERS["qwen_distilled"], 8),
    ],
)
def test_the_ready_files_serve_distilled_models_in_few_steps_without_guidance(
    config: str, build: Callable[[Path], None], steps: int, tmp_path: Path
) -> None:
    build(tmp_path / "model")
    sizes = {"height": 64, "width": 64, "num_frames": 5}  # which the tiny model has the positions for
    for role in ROLES:
        settled = settle({"model_path": str(tmp_path / "model")}, {}, str(CONFIGS / config / f"{role}.toml"))
        said = settled.server_args().instance_config(default_device="cpu").model
        defaults = said.defaults | {name: size for name, size in sizes.items() if name in said.defaults}
        schema = load_pipeline(replace(said, defaults=defaults), (Role.DECODER,), "cpu").schema
        served = complete(schema, {"prompt": "a cat"})
        assert served["num_inference_steps"] == steps
        assert {served[name] for name in ("guidance_scale", "guidance_scale_2") if name in served} == {1.0}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_frames", 16, "multiple of 4 plus 1"),
        ("num_inference_steps", 1000, "must lie between 1 and 100"),
        ("guidance_scale", "high", "must be of type number"),
        ("prompt", "a cat", "has defaults of negative_prompt, height"),
        ("cfg", 0, "must be true or false"),
        ("n", 2, "has defaults of"),
        ("steps", 20, "WanPipeline has defaults of"),
    ],
)
def test_a_default_that_no_request_could_say_is_refused_before_weights_are_loaded(
    name: str, value: int | str, reason: str
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("weights were loaded")

    model = ModelConfig(path="tiny", device="cpu", defaults={name: value})
    with pytest.raises(ConfigError) as caught:
        load_pipeline(model, (Role.ENCODER,), "cpu", component=refuse)
    assert f"--default {name}={value!r}" in caught.value.message
    assert reason in caught.value.message


def test_the_limit_on_pixels_counts_all_frames(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED["tiny"], folder)
    settings = json.loads((folder / "triptych.json").read_text())
    settings["limits"]["max_pixels"] = 128 * 128 * 17
    (folder / "triptych.json").write_text(json.dumps(settings))
    schema = load(folder).schema
    assert complete(schema, {"prompt": "a"})["num_frames"] == 17
    with pytest.raises(BadRequest, match="128x128 in 21 frames is 344064 pixels; at most 17 frames fit at that size"):
        complete(schema, {"prompt": "a", "num_frames": 21})


@pytest.mark.parametrize(("task", "split"), [(None, "modular"), ("image-to-image", "replay")])
def test_a_scale_that_the_model_was_not_taught_to_see_is_not_offered(
    checkpoint: Callable[[str], Path], tmp_path: Path, task: Task | None, split: str
) -> None:
    """Symptom: FLUX.1-schnell took guidance_scale as classifier-free guidance, and it changed no byte."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("flux"), folder)
    config = folder / "transformer" / "config.json"

    def schema() -> RequestSchema:
        return load_pipeline(ModelConfig(path=str(folder), device="cpu", task=task), (Role.DECODER,), "cpu").schema

    taught = schema()
    assert taught.split == split
    assert taught.param("guidance_scale") is not None
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": False}))
    schnell = schema()
    assert set(names(taught)) - set(names(schnell)) == {"guidance_scale"}
    with pytest.raises(BadRequest, match="takes no such parameter"):
        complete(schnell, {"prompt": "a cat", "guidance_scale": 3.5})
