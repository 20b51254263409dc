"""Request parameters to the first pipeline state, and to the settings that are not state: guidance."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch

from triptych.config import CFG
from triptych.errors import BadRequest, ConfigError
from triptych.pipeline.families import Family
from triptych.pipeline.names import AREA, COUNT_INPUTS, GUIDANCE_STEPS, GUIDERS, SCALES, STAGE_STEPS
from triptych.pipeline.pictures import opened
from triptych.wire.adapters import read_adapters
from triptych.wire.schema import Param, RequestSchema

_STATE_NAMES = (
    "prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps", "guidance_scale",
    "true_cfg_scale", "max_sequence_length", "strength",
)  # fmt: skip
"""Parameters that pipelines take under the same name, where they take them at all."""

_Scalar: TypeAlias = bool | int | float | str

_NO_DEFAULT = ("n", "output_format")
"""Their defaults are the doors' own."""


def complete(schema: RequestSchema, params: Mapping[str, Any]) -> dict[str, Any]:
    """``params`` with the schema's defaults filled in; raises `BadRequest` for what the schema does not allow."""
    for name in params:
        if schema.param(name) is None:
            known = ", ".join(param.name for param in schema.params)
            raise BadRequest(name, f"{name}: {schema.pipeline} takes no such parameter, only {known}")
    found = {
        param.name: _checked(param, params.get(param.name, param.default_beside(params))) for param in schema.params
    }
    if (objection := schema.objection(found)) is not None:
        raise BadRequest(objection.field, objection.message)
    return found


def guidance_is_off(schema: RequestSchema) -> bool:
    """Whether requests have no guidance unless they ask for it; False also of a model that never has any."""
    scales = [param for param in schema.params if param.off is not None]
    return bool(scales) and all(param.default is None or param.default == param.off for param in scales)


def with_defaults(schema: RequestSchema, defaults: Mapping[str, _Scalar]) -> RequestSchema:
    """``schema`` with ``defaults`` in place of its own. Raises `ConfigError` for what no request could say."""
    defaults = _guidance_resolved(schema, defaults)
    for name, value in defaults.items():
        param = schema.param(name)
        if param is None or param.required or name in _NO_DEFAULT or param.type in ("image", "images", "video"):
            can = ", ".join(p.name for p in schema.params if not p.required and p.name not in _NO_DEFAULT)
            raise ConfigError(f"--default {name}={value!r}: {schema.pipeline} has defaults of {can}")
        try:
            _checked(param, value)
        except BadRequest as error:
            raise ConfigError(f"--default {error.message}") from error
    params = tuple(
        msgspec.structs.replace(param, default=defaults[param.name], unless="") if param.name in defaults else param
        for param in schema.params
    )
    changed = msgspec.structs.replace(schema, params=params)
    if defaults and (objection := changed.objection({p.name: p.default for p in params})) is not None:
        raise ConfigError(f"--default {objection.message}")
    return changed


def _guidance_resolved(schema: RequestSchema, defaults: Mapping[str, _Scalar]) -> dict[str, _Scalar]:
    """``defaults`` without `CFG`: where it is false, with every scale of classifier-free guidance at its off value, and
    without scales that the model does not have, which would be off."""
    found = dict(defaults)
    guided = found.pop(CFG, True)
    if not isinstance(guided, bool):
        raise ConfigError(f"--default {CFG}={guided!r}: must be true or false")
    if guided:
        return found
    off: dict[str, _Scalar] = {param.name: param.off for param in schema.params if param.off is not None}
    moot = {name for name in SCALES if schema.param(name) is None}
    return {name: value for name, value in found.items() if name not in moot} | off


def first_state(
    inputs: Iterable[Any], params: Mapping[str, Any], images: Sequence[bytes], family: Family
) -> dict[str, Any]:
    """Entries of the first state, for the declared ``inputs`` of the whole, uncut pipeline.

    All of them are set, for a part alone would apply other defaults than the whole. The random generator
    lives on the CPU, where equal seeds draw equal numbers on any machine.
    """
    seed = params.get("seed")
    names = (*_STATE_NAMES, *(param.name for param in family.extras))
    known: dict[str, Any] = {name: params[name] for name in names if params.get(name) is not None}
    known |= opened(family.pictures, params, images)
    known["generator"] = torch.Generator("cpu").manual_seed(secrets.randbits(53) if seed is None else seed)
    known |= dict.fromkeys(COUNT_INPUTS, params.get("n", 1))
    known["output_type"] = "pt"
    if params.get("height") and params.get("width"):
        known[AREA] = params["height"] * params["width"]
    if params.get("fps") is not None:
        known["frame_rate"] = float(params["fps"])
    inputs = list(inputs)
    stages = next((entry.default for entry in inputs if entry.name == STAGE_STEPS), None)
    scales = next((entry.default for entry in inputs if entry.name == GUIDANCE_STEPS), None)
    steps = params.get("num_inference_steps")
    if stages and steps is not None:
        known[STAGE_STEPS] = [steps // len(stages)] * len(stages)
    if scales and steps is not None:  # the same course over more or fewer steps
        known[GUIDANCE_STEPS] = [scales[(2 * step + 1) * len(scales) // (2 * steps)] for step in range(steps)]
    return {entry.name: known.get(entry.name, entry.default) for entry in inputs}


def guider_settings(family: Family, params: Mapping[str, Any], guider: str, *, encoder: bool) -> dict[str, Any]:
    """What to change in the pipeline's component ``guider`` for one request."""
    own = GUIDERS.get(guider)
    if own is None or (encoder and family.encoder_needs_guider):
        return {}
    scale = params.get(own.param)
    if scale is None and own.follows:
        scale = params.get("guidance_scale")
    if scale is None:
        return {}
    # A guider of scale 1 combines nothing, but may have more to it than the scale; some are off by their own default.
    return {"guidance_scale": float(scale) + family.guidance_offset, "enabled": True}


def _checked(param: Param, value: Any) -> Any:
    name = param.name
    if value is None:
        if param.required:
            raise BadRequest(name, f"{name} is required")
        if not param.nullable:
            raise BadRequest(name, f"{name} must not be null")
        return None
    if not _has_type(param, value):
        raise BadRequest(name, f"{name}={value!r}: must be of type {param.type}")
    if param.type == "adapters":
        try:
            read_adapters(value, param.choices)
        except ValueError as error:
            raise BadRequest(name, f"{name}={value!r}: {error}") from error
    elif param.choices and value not in param.choices:
        raise BadRequest(name, f"{name}={value!r}: must be one of {', '.join(param.choices)}")
    if param.max_length is not None and isinstance(value, (str, list)) and len(value) > param.max_length:
        raise BadRequest(name, f"{name}: {len(value)} long, at most {param.max_length} are allowed")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(param, value)
    return value


def _has_type(param: Param, value: Any) -> bool:
    match param.type:
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "image" | "video":
            return isinstance(value, dict) and set(value) == {"blob"}
        case "adapters":
            return isinstance(value, str)
        case "images":
            return isinstance(value, list) and all(isinstance(item, dict) and set(item) == {"blob"} for item in value)


def _check_number(param: Param, value: float) -> None:
    low, high = param.minimum, param.maximum
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise BadRequest(param.name, f"{param.name}={value}: must lie between {low} and {high}")
    if param.multiple_of is not None and (value - param.remainder) % param.multiple_of:
        more = f" plus {param.remainder}" if param.remainder else ""
        raise BadRequest(param.name, f"{param.name}={value}: must be a multiple of {param.multiple_of}{more}")
