"""What requests may say to a classic pipeline, and how that becomes arguments of its ``__call__``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triptych.pipeline.anatomy import Anatomy
from triptych.pipeline.cut import Cut
from triptych.pipeline.families import Preset, family_of
from triptych.pipeline.names import (
    CONTROL,
    COUNT_INPUTS,
    GUIDANCE,
    LAST,
    MASK,
    SPATIAL,
    TEMPORAL,
    TRUE_GUIDANCE,
    factor,
)
from triptych.pipeline.request import first_state
from triptych.pipeline.schema import Settings, build_schema
from triptych.wire.schema import Param, RequestSchema

ALIASES: dict[str, tuple[str, ...]] = {
    GUIDANCE: (GUIDANCE, "max_guidance_scale", "distilled_guidance_scale", TRUE_GUIDANCE),
    "num_frames": ("num_frames", "video_length", "frames"),
    "fps": ("fps", "frame_rate"),
}
"""Request parameter to what pipelines call it: the first that a signature has a value for, else the first it has."""

SECOND_SCALE = "guidance_scale_2"
"""Guidance of the second transformer, of pipelines that may have two."""

_SAME = (
    "prompt", "negative_prompt", "height", "width", "num_inference_steps", "max_sequence_length", "strength",
    *COUNT_INPUTS,
)  # fmt: skip

_SIDE_MULTIPLES = {"GlmImagePipeline": 32, "StableVideoDiffusionPipeline": 8}
"""Classes that ask for more than the sizes in their configs say."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One parameter, as a modular block would declare it."""

    name: str
    default: Any = None


def call_arguments(anatomy: Anatomy, params: Mapping[str, Any], images: Sequence[bytes]) -> tuple[dict[str, Any], int]:
    """Arguments of ``__call__`` without the generator, and the seed. ``params`` are complete.

    Raises `BadRequest` for an image that cannot be read.
    """
    arguments = first_state(_declared(anatomy), params, images, family_of(anatomy.pipeline))
    seed = arguments.pop("generator").initial_seed()
    if params.get(SECOND_SCALE) is not None:
        arguments[SECOND_SCALE] = params[SECOND_SCALE]
    if arguments.get(TRUE_GUIDANCE, 0) > 1 and arguments["negative_prompt"] is None and not _guides(anatomy):
        arguments["negative_prompt"] = ""  # without one the call would ignore the scale
    for name, own in _aliases(anatomy).items():
        arguments.pop(name, None)
        if params.get(name) is not None:
            arguments[own] = params[name]
    return {name: value for name, value in arguments.items() if name in anatomy.parameters}, seed


def guider_changes(anatomy: Anatomy, params: Mapping[str, Any]) -> dict[str, Any]:
    """What to change in a pipeline's guider for one request, where guidance is not an argument of the call."""
    scale = params.get(GUIDANCE)
    if scale is None or GUIDANCE in _aliases(anatomy):
        return {}
    return {GUIDANCE: float(scale), "enabled": True}


def build_replay_schema(
    model: str, index: dict[str, Any], pipeline: Any, anatomy: Anatomy, settings: Settings
) -> RequestSchema:
    """The schema of a classic pipeline. ``pipeline`` has its configs, be it with stand-ins only."""
    given = frozenset(name for name in ("prompt", "image", MASK, CONTROL) if name in _names(anatomy))
    parts = Cut(
        inputs=_declared(anatomy),
        outputs=frozenset({"videos" if anatomy.output == "video" else "images"}),
        parts={},
        needs={},
        denoiser_writes=frozenset(),
        executed={},
        given=given,
    )
    facts = _Facts(pipeline)
    family = family_of(anatomy.pipeline)
    family = dataclasses.replace(family, preset=_merged(_preset(facts, anatomy), family.preset))
    schema = build_schema(model, index, facts, parts, family, settings)
    multiple = _side_multiple(facts, index["_class_name"])
    if SECOND_SCALE in anatomy.parameters and pipeline.config.get("boundary_ratio") is not None:
        second = Param(name=SECOND_SCALE, type="number", nullable=True, minimum=0.0, maximum=100.0, off=0.0,
                       description="The same for the second transformer; None is guidance_scale.")  # fmt: skip
        schema = msgspec.structs.replace(schema, params=(*schema.params, second))
    fixed = _config(facts, "use_learned_positional_embeddings") is True
    params = tuple(
        _adapted(param, multiple, fixed=fixed) for param in schema.params if param.name != "prompt" or "prompt" in given
    )
    return msgspec.structs.replace(schema, split="replay", task=anatomy.task, params=params)


def _names(anatomy: Anatomy) -> dict[str, Any]:
    """Request parameters that the call takes, with the call's defaults."""
    found = {name: anatomy.parameters[name] for name in _SAME if name in anatomy.parameters}
    if anatomy.takes_image:
        found["image"] = None
    if anatomy.takes_mask:
        found[MASK] = None
    if anatomy.takes_control:
        found[CONTROL] = None
    found |= dict.fromkeys({LAST} & anatomy.parameters.keys())
    found |= dict.fromkeys(anatomy.carried)
    extras = (extra.name for extra in family_of(anatomy.pipeline).extras)
    found |= {name: anatomy.parameters[name] for name in extras if name in anatomy.parameters}
    aliases = _aliases(anatomy)
    found |= {name: anatomy.parameters[own] for name, own in aliases.items()}
    if "negative_prompt" in found and GUIDANCE in aliases and aliases[GUIDANCE] != TRUE_GUIDANCE:
        found |= {name: anatomy.parameters[name] for name in {TRUE_GUIDANCE} & anatomy.parameters.keys()}
    return found


def _guides(anatomy: Anatomy) -> bool:
    """Whether the second scale of guidance is on by itself, though without a negative prompt it does nothing."""
    return anatomy.parameters[TRUE_GUIDANCE] > 1


def _aliases(anatomy: Anatomy) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, owns in ALIASES.items():
        known = [own for own in owns if own in anatomy.parameters]
        valued = [own for own in known if anatomy.parameters[own] is not None]
        if valued or (known and name != GUIDANCE):
            found[name] = (valued or known)[0]
    return found


def _declared(anatomy: Anatomy) -> tuple[_Entry, ...]:
    """The signature in the form in which modular blocks declare their inputs."""
    names = {**_names(anatomy), "generator": None, "output_type": None}
    return tuple(
        _Entry(name=name, default=default if isinstance(default, (int, float, str)) else None)
        for name, default in names.items()
    )


def _preset(facts: Any, anatomy: Anatomy) -> Preset:
    """Defaults from the signature, and where it says None, from the configs that the pipeline itself falls back to."""
    names = _names(anatomy)
    fields = {field.name for field in dataclasses.fields(Preset)}
    numbers: dict[str, Any] = {
        name: default
        for name, default in names.items()
        if name in fields and isinstance(default, (int, float)) and not isinstance(default, bool)
    }
    for side in ("height", "width"):
        if not numbers.get(side) and (size := _native_size(facts, side)):
            numbers[side] = size
    if anatomy.output == "video" and not numbers.get("num_frames"):
        frames = _config(facts, "num_frames") or _config(facts, "sample_frames")
        if isinstance(frames, int):
            numbers["num_frames"] = frames
    if "max_sequence_length" in numbers and isinstance(length := _config(facts, "max_text_seq_length"), int):
        numbers["max_sequence_length"] = length
    if "fps" in numbers:
        numbers["fps"] = round(numbers["fps"])
    return Preset(**numbers)


def _merged(found: Preset, ours: Preset) -> Preset:
    """``found`` with what we know better."""
    return dataclasses.replace(found, **{n: v for n, v in dataclasses.asdict(ours).items() if v is not None})


def _native_size(facts: Any, side: str) -> int:
    """The height or width in pixels that the denoiser was trained at; 0 when its config does not say."""
    if isinstance(default := getattr(facts, f"default_{side}", None), int):
        return default
    own = getattr(facts, "default_sample_size", None)
    latent = _config(facts, f"sample_{side}") or _config(facts, "sample_size") or own
    if isinstance(latent, (list, tuple)):
        latent = latent[0 if side == "height" else -1]
    return latent * facts.vae_scale_factor if isinstance(latent, int) else 0


class _Facts:
    """A pipeline with its compression factors under the names that the schema knows."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.vae_scale_factor = factor(pipeline, SPATIAL) or 8
        self.vae_scale_factor_temporal = factor(pipeline, TEMPORAL) or 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


def _config(pipeline: Any, key: str) -> Any:
    for name in ("transformer", "unet"):
        value = getattr(getattr(getattr(pipeline, name, None), "config", None), key, None)
        if value is not None:
            return value
    return None


def _side_multiple(facts: Any, pipeline_class: str) -> int:
    """What sides must divide by, for a U-Net to halve them as often as it does, and where a class asks for more."""
    levels = getattr(getattr(getattr(facts, "unet", None), "config", None), "block_out_channels", None)
    own = facts.vae_scale_factor * 2 ** (len(levels) - 1) if levels else 1
    return math.lcm(own, _SIDE_MULTIPLES.get(pipeline_class, 1))


def _adapted(param: Param, multiple: int, *, fixed: bool) -> Param:
    """``param`` with sides that the class takes; ``fixed``: its learned positions are those of one size."""
    if param.name not in ("height", "width") or param.multiple_of is None:
        return param
    multiple = math.lcm(multiple, param.multiple_of)
    default = int(param.default or 0)
    default = max(multiple, default - default % multiple)
    most = max(int(param.maximum or 0), default)
    return msgspec.structs.replace(
        param,
        multiple_of=multiple,
        minimum=default if fixed else multiple,
        maximum=default if fixed else most - most % multiple,
        default=default,
    )
