"""JSON Schema of the bodies that start a task or a remix."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from triptych.api.aspect import ADAPTIVE
from triptych.api.openapi_params import (
    FILE,
    NO_PROMPT,
    REFERENCE,
    nullable,
    property_of,
    seconds_schema,
    size_pattern,
)
from triptych.api.orders import Output, accepted, picture_params
from triptych.api.task_orders import LORA, NEUTRAL, PICTURES, RENAMED, SUFFIXES
from triptych.ids import MAX_ADAPTER_SCALE
from triptych.wire.schema import RequestSchema

KINDS: Final = (("application/json", ""), ("multipart/form-data", "Form"))
"""Content type of a body, and what its schema's name ends in."""

_ADAPTIVE: Final = (
    "Where no size is given, the output has the shape of the picture and at most the area of the model's own size."
)
_STRENGTHS: Final = {"minimum": -MAX_ADAPTER_SCALE, "maximum": MAX_ADAPTER_SCALE}

UNKNOWN: Final[dict[str, Any]] = {
    "type": "object",
    "description": "No model is known yet.",
    "properties": {},
    "required": ["prompt"],
}


def task_body(schema: RequestSchema | None, output: Output, *, form: bool, single: bool = False) -> dict[str, Any]:
    """A request of the Task API. The pipeline's own names are accepted besides; they are not listed twice.

    ``single``: it is answered with one image.
    """
    if schema is None:
        return UNKNOWN
    params = accepted(schema, output)
    if single or schema.param("n") is None:
        params["n"] = msgspec.structs.replace(params["n"], maximum=1)
    pictures = picture_params(schema, output)
    spoken = {name: old for old, name in RENAMED.items()}
    fields = {spoken.get(name, name): property_of(p, form=form) for name, p in params.items() if name not in pictures}
    fields["model"] = {"type": "string", "enum": list(schema.names)}
    fields.setdefault("prompt", NO_PROMPT)
    fields["task_id"] = {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$"}
    endings = "|".join(suffix[1:] for suffix in SUFFIXES[output])
    fields["save_result_path"] = {
        "type": "string",
        "description": "Relative path in the server's output folder; letters of other languages may stand in it too.",
        "pattern": rf"^([A-Za-z0-9_-]{{1,60}}(/[A-Za-z0-9_-]{{1,60}}){{0,3}}(\.({endings}))?)?$",
    }
    exclusive = [["save_result_path", "output_format"]]
    if {"height", "width"} <= params.keys():
        fields["aspect_ratio"] = {"type": "string", "pattern": "^([1-9][0-9]{0,2}:[1-9][0-9]{0,2})?$"}
        exclusive += [["aspect_ratio", "height"], ["aspect_ratio", "width"]]
        if not form:
            sides = [property_of(params[name]) for name in ("height", "width")]
            both = {"type": "array", "prefixItems": sides, "minItems": 2, "maxItems": 2}
            fields["target_shape"] = {"anyOf": [both, {"type": "array", "maxItems": 0}]}
            exclusive += [["target_shape", name] for name in ("aspect_ratio", "height", "width")]
    required = sorted(spoken.get(n, n) for n, p in params.items() if p.required and n not in pictures)
    for name, own in PICTURES.items():
        own = own or next(iter(pictures), "")
        if name.endswith("_file") is form and own in pictures:
            fields[name] = FILE if form else REFERENCE
            if params[own].required:
                required.append(name)
    for name, values in NEUTRAL.items():
        if name == "lora_strength" and LORA in params:
            text = "Of every adapter in lora_name that has none of its own."
            fields[name] = {"type": "number", "description": text, **_STRENGTHS}
        elif values and RENAMED.get(name, name) not in params and not form:
            text = _ADAPTIVE if name == ADAPTIVE else "Accepted for its neutral value only."
            fields[name] = {"enum": list(values), "description": text}
    if not form:
        fields = {name: found if name in required else nullable(found) for name, found in fields.items()}
    body = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    return body | {"not": {"anyOf": [{"required": pair} for pair in exclusive]}}


def remix_body(schema: RequestSchema | None, *, form: bool) -> dict[str, Any]:
    """What a remix may change: at least the prompt."""
    if schema is None:
        return UNKNOWN
    params = accepted(schema, "video")
    fields = {name: property_of(param, form=form) for name, param in params.items()}
    if {"height", "width"} <= params.keys():
        fields["size"] = {"type": "string", "pattern": size_pattern(params)}
    if {"num_frames", "fps"} <= params.keys():
        fields["seconds"] = seconds_schema(params, form=form)
    required = ["prompt"] if "prompt" in fields else []
    fields.setdefault("prompt", NO_PROMPT)
    if not form:
        fields = {name: found if name in required else nullable(found) for name, found in fields.items()}
    pairs = [["size", "width"], ["size", "height"], ["seconds", "num_frames"]]
    exclusive = [{"required": pair} for pair in pairs if set(pair) <= fields.keys()]
    body = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    return body | ({"not": {"anyOf": exclusive}} if exclusive else {})
