"""The request schema of a model: what its pipeline declares, bounded by its config, settings file and presets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from triptych.errors import ModelError
from triptych.pipeline.cut import Cut
from triptych.pipeline.families import BASE, Family, Preset
from triptych.pipeline.names import (
    CHUNK,
    COUNT_INPUTS,
    GUIDANCE,
    GUIDERS,
    LAST,
    SPATIAL,
    STAGE_STEPS,
    TEMPORAL,
    TRUE_GUIDANCE,
    factor,
)
from triptych.pipeline.pictures import picture_params
from triptych.pipeline.shift import FLOW_SHIFT, shift_of
from triptych.pipeline.source import spelled
from triptych.wire.schema import Beside, HandoffSize, Param, RequestSchema

SETTINGS = "triptych.json"
"""Optional file in a model folder: {"defaults": {...}, "limits": {...}} under the names of `Preset`."""

MAX_SEED = float(2**63 - 1)
_ITEM_BYTES = 4

MAX_PROMPT = 32_768
"""Characters; the tokenizer cuts at max_sequence_length anyway."""

_DEFAULTS = (
    "height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale", "max_sequence_length",
)  # fmt: skip
_LIMITS = ("max_side", "max_pixels", "max_frames", "max_steps", "max_sequence_length", "max_n")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A model folder's own defaults and limits."""

    defaults: dict[str, int | float] = dataclasses.field(default_factory=dict[str, "int | float"])
    limits: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


def read_settings(folder: Path) -> Settings:
    """The folder's `SETTINGS`; empty without the file. Raises `ModelError` for an unknown or ill-typed entry."""
    file = folder / SETTINGS
    if not file.is_file():
        return Settings()
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict) or not set(content) <= {"defaults", "limits"}:
        raise ModelError(f"{file}: must be an object with the entries defaults and limits")
    return Settings(
        defaults=_numbers(file, "defaults", content.get("defaults", {}), _DEFAULTS),
        limits=_numbers(file, "limits", content.get("limits", {}), _LIMITS),
    )


def build_schema(
    model: str, index: dict[str, Any], whole: Any, parts: Cut, family: Family, settings: Settings
) -> RequestSchema:
    """The schema of ``model``. ``whole`` is the uncut pipeline with stand-ins, which knows every config."""
    builder = _Builder(whole, parts, family, settings)
    output = "video" if "videos" in parts.outputs else "image"
    params = builder.params(output)
    return RequestSchema(
        model=spelled(model),
        pipeline=index["_class_name"],
        split="modular",
        task=f"{'image' if 'image' in parts.given else 'text'}-to-{output}",
        output=output,
        params=tuple(params),
        handoff=builder.handoff(),
        max_pixels=builder.max_pixels,
    )


class _Builder:
    def __init__(self, whole: Any, parts: Cut, family: Family, settings: Settings) -> None:
        self._whole = whole
        self._parts = parts
        self._family = family
        self._settings = settings
        self._inputs = {entry.name: entry for entry in parts.inputs}

    def params(self, output: str) -> list[Param]:
        """All parameters, in the order in which people think of them."""
        found = [
            Param(name="prompt", type="string", required=True, max_length=MAX_PROMPT, description="What to show."),
            *self._negative_prompt(),
            *self._pictures(),
            *self._side("height"),
            *self._side("width"),
            *(self._video() if output == "video" else ()),
            *self._steps(),
            *self._guidance(),
            *self._true_guidance(),
            *self._flow_shift(),
            *self._strength(),
            Param(name="seed", type="integer", nullable=True, minimum=0, maximum=MAX_SEED,
                  description="Equal seeds give equal outputs; None draws one."),
            *self._sequence_length(),
            *(extra for extra in self._family.extras if extra.name in self._inputs),
            *self._count(),
            Param(name="output_format", type="string", nullable=True,
                  choices=(*(("mp4",) if output == "video" else ()), "png", "jpeg", "webp"),
                  description="File format; None is mp4 for a clip and png for a single frame."),
        ]  # fmt: skip
        return found

    @property
    def max_pixels(self) -> int | None:
        """Most pixels of one output."""
        return self._limit("max_pixels")

    def handoff(self) -> HandoffSize:
        """Size of the tensors that cross and grow with a request."""
        channels = self._fact("num_channels_latents", 16)
        conditions = _config(self._whole, "transformer", "in_channels") - channels if self._family.conditions else 0
        return HandoffSize(
            channels=channels,
            condition_channels=conditions,
            spatial=self._spatial,
            temporal=self._temporal,
            item_bytes=_ITEM_BYTES,
        )

    # -- single parameters ----------------------------------------------------------------------------------------

    def _negative_prompt(self) -> list[Param]:
        if "negative_prompt" not in self._inputs:
            return []
        needs = next((param.name for param in self._true_guidance() if param.nullable), "")
        return [Param(name="negative_prompt", type="string", nullable=True, max_length=MAX_PROMPT, needs=needs,
                      description="What to avoid; needs guidance.")]  # fmt: skip

    def _pictures(self) -> list[Param]:
        pictures = self._family.pictures
        paired = bool(pictures.pair_setting and _config(self._whole, "transformer", pictures.pair_setting))
        given, optional = self._parts.given, self._parts.optional
        return list(picture_params(pictures, self._inputs, given, paired=paired, optional=optional))

    def _strength(self) -> list[Param]:
        if "image" not in self._parts.given or "strength" not in self._inputs:
            return []
        return [Param(name="strength", type="number", default=float(self._declared("strength")), minimum=0.0,
                      maximum=1.0,
                      description="How much of the picture is made anew; 1 is all.")]  # fmt: skip

    def _side(self, name: str) -> list[Param]:
        pictures = self._family.pictures
        follows = pictures.whole and pictures.follows
        if follows and name not in self._inputs:
            return []
        multiple = self._side_multiple
        most = self._limit("max_side") or 2048
        default = self._default(name) or self._declared(name) or self._fact(f"default_{name}", 512)
        param = _stepped(name, default, multiple, 0, most, "Pixels.", least=multiple)
        if follows and "image" in self._parts.given:
            param = replace(param, default=None, nullable=True, description="Pixels; None follows the picture.")
        if follows and "image" in self._parts.optional:
            param = replace(param, nullable=True, unless="image", description="Pixels; with a picture, as it has.")
        return [param]

    def _video(self) -> list[Param]:
        params: list[Param] = []
        if "num_frames" in self._inputs:
            params.append(self._frames())
        fps = self._own_default("fps") or round(self._declared("frame_rate") or 0) or self._default("fps")
        params.append(Param(name="fps", type="integer", default=fps, minimum=1, maximum=120,
                            description="Frames per second of the file."))  # fmt: skip
        return params

    def _frames(self) -> Param:
        most = self._limit("max_frames") or 257
        default = self._default("num_frames") or self._declared("num_frames") or self._fact("default_num_frames", 1)
        chunk = self._declared(CHUNK)
        if chunk:
            # Only whole chunks are made.
            length = self._temporal * (chunk - 1) + 1
            return _stepped("num_frames", default, length, 0, most, "Frames of the clip.", least=length)
        # What goes from a first picture to a last one has at least one latent frame beyond that of the first.
        last = next((picture for picture in self._pictures() if picture.name == LAST), None)
        least = self._limit("min_frames") or (self._temporal + 1 if last is not None and last.required else 1)
        what = "Frames of the clip; 1 gives an image." if least == 1 else "Frames of the clip."
        param = _stepped("num_frames", default, self._temporal, 1, most, what, least=least)
        beside = (Beside(param=LAST, minimum=self._temporal + 1),) if last is not None and not last.required else ()
        return replace(param, beside=beside)

    def _steps(self) -> list[Param]:
        stages = self._declared(STAGE_STEPS)
        if stages:
            default = self._default("num_inference_steps") or sum(stages)
            most = self._limit("max_steps") or 200
            what = f"Denoising steps of the {len(stages)} stages of one chunk."
            return [_stepped("num_inference_steps", default, len(stages), 0, most, what, least=len(stages))]
        if "num_inference_steps" not in self._inputs:
            return []
        default = self._default("num_inference_steps") or self._declared("num_inference_steps") or 50
        # A schedule that is stretched to end at a given noise level divides by the length of its first step.
        least = self._limit("min_steps") or (2 if _config(self._whole, "scheduler", "shift_terminal") else 1)
        most = self._limit("max_steps") or 200
        return [_stepped("num_inference_steps", default, 1, 0, most, "Denoising steps.", least)]

    def _guidance(self) -> list[Param]:
        offset = self._family.guidance_offset
        off: float | None = 1.0 - offset
        text = "How strongly the prompt steers; the minimum turns guidance off."
        if self._guidance_is_unread:
            return []
        if GUIDANCE in self._inputs:
            default, least = self._inputs[GUIDANCE].default, self._family.guidance_least
            off = least
            if self._embeds_guidance:
                off, text = None, "How strongly the prompt steers, as the model itself was taught to see it."
        elif (scale := guider_scale(self._whole)) is not None:
            default, least = scale - offset, 1.0 - offset
        else:
            return []
        preset = self._default("guidance_scale")
        found = [Param(name=GUIDANCE, type="number", default=float(default if preset is None else preset),
                       minimum=least, maximum=100.0, off=off, description=text)]  # fmt: skip
        found += [Param(name=guider.param, type="number", nullable=True, minimum=least, maximum=100.0, off=off,
                        description=guider.description)
                  for name, guider in GUIDERS.items()
                  if guider.description and getattr(self._whole, name, None) is not None]  # fmt: skip
        return found

    def _true_guidance(self) -> list[Param]:
        """Classifier-free guidance next to a scale that is something else. Off by itself, it has no default, so that
        a negative prompt without it is refused and not ignored."""
        if TRUE_GUIDANCE not in self._inputs:
            return []
        own = float(self._declared(TRUE_GUIDANCE))
        on = own > 1.0
        away = "negative_prompt" if on else "negative_prompt, or from an empty one"
        return [Param(name=TRUE_GUIDANCE, type="number", default=own if on else None, nullable=not on, minimum=1.0,
                      maximum=100.0, off=1.0 if on else None,
                      description=f"How strongly the prompt steers away from {away}; at 1, not at all."
                      )]  # fmt: skip

    def _flow_shift(self) -> list[Param]:
        own = shift_of(getattr(self._whole, "scheduler", None))
        if own is None:
            return []
        return [Param(name=FLOW_SHIFT, type="number", default=own.value, minimum=0.01, maximum=100.0,
                      description="How far the schedule leans to high noise; larger for larger sizes.")]  # fmt: skip

    def _sequence_length(self) -> list[Param]:
        if "max_sequence_length" not in self._inputs:
            return []
        fixed = self._family.text_length or self._text_positions
        default = fixed or self._default("max_sequence_length") or self._inputs["max_sequence_length"].default or 512
        most = fixed or self._limit("max_sequence_length") or max(default, 512)
        return [Param(name="max_sequence_length", type="integer", default=default, minimum=fixed or 1, maximum=most,
                      description="Tokens of the prompt that are read.")]  # fmt: skip

    def _count(self) -> list[Param]:
        if not any(name in self._inputs for name in COUNT_INPUTS):
            return []
        # A VAE that is told a timestep is told one a prompt, which does not fit several outputs of it.
        most = 1 if _config(self._whole, "vae", "timestep_conditioning") else self._limit("max_n")
        return [Param(name="n", type="integer", default=1, minimum=1, maximum=most,
                      description="Outputs of one request.")]  # fmt: skip

    # -- facts of the model ---------------------------------------------------------------------------------------

    def _default(self, name: str) -> Any:
        found = self._settings.defaults.get(name)
        return _preset(self._family.preset, name) if found is None else found

    def _own_default(self, name: str) -> Any:
        """What the model folder or the family says, without what is said of all models."""
        found = self._settings.defaults.get(name)
        return getattr(self._family.preset, name) if found is None else found

    def _declared(self, name: str) -> Any:
        """The default of the pipeline's own declaration."""
        return self._inputs[name].default if name in self._inputs else None

    def _limit(self, name: str) -> int | None:
        found = self._settings.limits.get(name)
        if found is None:
            found = _preset(self._family.preset, name)
        reach = self._positions.get(name)
        return found if found is None or reach is None else min(found, reach)

    def _fact(self, name: str, otherwise: int) -> int:
        value = getattr(self._whole, name, None)
        return int(value) if isinstance(value, (int, float)) else otherwise

    @property
    def _embeds_guidance(self) -> bool:
        """Whether the call's scale is a condition of the transformer, and no classifier-free guidance."""
        return TRUE_GUIDANCE in self._inputs or bool(_config(self._whole, "transformer", "guidance_embeds"))

    @property
    def _guidance_is_unread(self) -> bool:
        """Whether the call's scale is a condition that this transformer does not know: FLUX.1-schnell takes none."""
        if GUIDANCE not in self._inputs or _config(self._whole, "transformer", "guidance_embeds") is not False:
            return False
        # Of classic pipelines some give the name to classifier-free guidance; blocks have a guider for that.
        return TRUE_GUIDANCE in self._inputs or (bool(self._parts.parts) and guider_scale(self._whole) is None)

    @property
    def _spatial(self) -> int:
        return factor(self._whole, SPATIAL) or 8

    @property
    def _temporal(self) -> int:
        return factor(self._whole, TEMPORAL) or 1 if "num_frames" in self._inputs else 1

    @property
    def _side_multiple(self) -> int:
        """Most latents are patched two by two, in the transformer or before it."""
        halved = len(self._declared(STAGE_STEPS) or [0]) - 1
        return self._spatial * max(self._family.latent_patch, self._patch[-1]) * 2**halved

    @property
    def _patch(self) -> tuple[int, ...]:
        patch = _config(self._whole, "transformer", "patch_size")
        return tuple(patch) if isinstance(patch, (tuple, list)) else (int(patch or 1),)

    @property
    def _text_positions(self) -> int | None:
        """How many tokens of text the transformer adds a table of positions to, which fits no other number."""
        found = _config(self._whole, "transformer", "max_text_seq_length")
        rotary = _config(self._whole, "transformer", "use_rotary_positional_embeddings")
        learned = _config(self._whole, "transformer", "use_learned_positional_embeddings")
        return found if isinstance(found, int) and (rotary is False or learned is True) else None

    @property
    def _positions(self) -> dict[str, int]:
        """How far the transformer's rotary position table reaches, in pixels and frames."""
        table = _config(self._whole, "transformer", "rope_max_seq_len")
        if not isinstance(table, int) or len(self._patch) != 3:
            return {}
        frames = self._temporal * (table * self._patch[0] - 1) + 1
        return {"max_side": table * self._patch[-1] * self._spatial, "max_frames": frames}


def _stepped(name: str, default: int, multiple: int, remainder: int, most: int, description: str, least: int) -> Param:
    """An integer parameter whose default and maximum are legal values themselves."""
    most -= (most - remainder) % multiple
    default = min(default, most)
    return Param(
        name=name,
        type="integer",
        default=default - (default - remainder) % multiple,
        minimum=least,
        maximum=most,
        multiple_of=multiple if multiple > 1 else None,
        remainder=remainder % multiple,
        description=description,
    )


def guider_scale(pipeline: Any) -> float | None:
    """Scale of the pipeline's own guider; None when it has none."""
    scale = getattr(getattr(pipeline, "guider", None), "guidance_scale", None)
    return None if scale is None else float(scale)


def _preset(preset: Preset, name: str) -> Any:
    found = getattr(preset, name)
    return getattr(BASE, name) if found is None else found


def _config(pipeline: Any, component: str, key: str) -> Any:
    return getattr(getattr(getattr(pipeline, component, None), "config", None), key, None)


def _numbers(file: Path, section: str, entries: Any, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(entries, dict):
        raise ModelError(f"{file}: {section} must be an object")
    for name, value in entries.items():
        if name not in known:
            raise ModelError(f"{file}: {section} has no entry {name!r}, only {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{file}: {section}.{name} must be a number, not {value!r}")
    return entries
