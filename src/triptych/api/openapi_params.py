"""JSON Schema of single request fields, from what the served model declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from triptych.api.unasked import AUTO, IMAGE_FIELDS, USER, USER_CHARACTERS
from triptych.api.validation import ADAPTER_CHARACTERS, INT64_MAX
from triptych.wire.schema import Param

_ENUM_LIMIT: Final = 512
"""Legal values that are listed one by one; more are described by bounds alone."""

FILE: Final = {"type": "string", "format": "binary"}
CLIP: Final = {**FILE, "description": "An MP4 or WebM clip; a still picture stands for one."}
REFERENCE: Final[dict[str, Any]] = {
    "description": "A picture (or clip) as a data URL, or by http(s) URL where the operator allows it.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "required": ["image_url"],
            "additionalProperties": False,
            "properties": {"image_url": {"type": "string", "minLength": 1}},
        },
    ],
}

NO_PROMPT: Final[dict[str, Any]] = {"enum": [""], "description": "This model takes no prompt; an empty one is none."}

_SCALE: Final = r"[+-]?(?:0{0,2}[0-9](?:\.[0-9]{0,30})?|0?10(?:\.0{0,30})?|\.[0-9]{1,30})(?:[eE]-[0-9]{1,3})?"
"""Of an adapter: a number within `MAX_ADAPTER_SCALE` of 0."""

_TYPES: Final = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean"}


def property_of(param: Param, *, form: bool = True) -> dict[str, Any]:
    """A request field that is ``param`` under whatever name."""
    match param.type:
        case "image":
            return FILE if form else REFERENCE
        case "video":
            return CLIP if form else REFERENCE
        case "images":
            return {"type": "array", "items": FILE if form else REFERENCE}
        case "adapters":
            pattern = _adapters(param.choices)
            return {
                "type": "string",
                "description": param.description,
                "pattern": pattern,
                "maxLength": ADAPTER_CHARACTERS,
            }
        case _:
            found: dict[str, Any] = {"type": _TYPES[param.type]}
    if param.description:
        found["description"] = param.description
    if param.default is not None:
        found["default"] = param.default
    if param.choices:
        found["enum"] = list(param.choices)
    if param.type == "string":
        if param.max_length is not None:
            found["maxLength"] = param.max_length
        if param.required:
            found["pattern"] = r"[^\s\x1c-\x1f\x85]"  # what Python, too, takes for more than space
    values = legal_values(param)
    if values is not None:
        found["enum"] = values
    else:
        found |= _bounds(param)
    return found


def _adapters(names: Sequence[str]) -> str:
    """What `read_adapters` accepts: names of adapters, each once, each with a scale or none, and commas between."""
    name = f"(?:{'|'.join(names)})"
    one = f" *{name}(?::{_SCALE})? *"
    again = rf"(?!(?:.*,)? *({name})(?::[^,]*)? *,(?:.*,)? *\1 *(?:[:,]|$))"
    return f"^{again}{one}(?:,{one})*$"


def _bounds(param: Param) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    exact = param.type == "integer"
    for key, value in (("minimum", param.minimum), ("maximum", param.maximum)):
        if value is not None:
            bounds[key] = min(int(value), INT64_MAX) if exact else value
    if param.multiple_of is not None and not param.remainder:
        bounds["multipleOf"] = param.multiple_of
    return bounds


def legal_values(param: Param) -> list[int] | None:
    """Every legal value of a parameter that only some integers fit; None when they are too many to list."""
    if param.multiple_of is None or param.minimum is None or param.maximum is None:
        return None
    low, high = int(param.minimum), int(param.maximum)
    first = low + (param.remainder - low) % param.multiple_of
    values = range(first, high + 1, param.multiple_of)
    return list(values) if 0 < len(values) <= _ENUM_LIMIT else None


def size_pattern(params: dict[str, Param]) -> str:
    """What ``size`` may be."""
    sides: list[str] = []
    for name in ("width", "height"):
        values = legal_values(params[name])
        sides.append(r"\d{1,5}" if values is None else f"({'|'.join(map(str, values))})")
    return f"^({AUTO}|{sides[0]}x{sides[1]})$"


def seconds_schema(params: dict[str, Param], *, form: bool) -> dict[str, Any]:
    """What ``seconds`` may be."""
    frames, fps = params["num_frames"], params["fps"].default
    text = "Length of the clip; becomes the nearest number of frames that the model can make."
    number: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
    whole: dict[str, Any] = {"type": "string", "pattern": "^[0-9]{1,4}$"}
    if isinstance(fps, int | float) and fps and frames.maximum is not None:
        number["maximum"] = frames.maximum / fps
        whole = {"type": "string", "enum": [str(n) for n in range(1, int(frames.maximum / fps) + 1)]}
    if form or whole.get("enum") == []:
        return {"description": text, **number}
    return {"description": text, "anyOf": [number, whole]}


def image_defaults(params: Mapping[str, Param], *, form: bool) -> dict[str, Any]:
    """Optional fields of OpenAI's images API with the values of them that are accepted. Of a form only the texts are
    listed: how its clients write anything else differs."""
    found: dict[str, Any] = {}
    for name, values in IMAGE_FIELDS.items():
        if name not in params and values and not (form and not isinstance(values[0], str)):
            found[name] = {"enum": list(values), "description": "Accepted for its neutral value only."}
    if USER not in params:
        found[USER] = {"type": "string", "maxLength": USER_CHARACTERS, "description": "Without effect."}
    return found


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, or null: "not given"."""
    return {"anyOf": [schema, {"type": "null"}]}
