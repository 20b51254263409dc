"""The OpenAPI document, with request bodies that say what the served model accepts."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from triptych.api.orders import RESPONSE_FORMATS, Output, accepted, model_names, spoken
from triptych.api.validation import INT64_MAX
from triptych.wire.schema import Param, RequestSchema

_ENUM_LIMIT: Final = 512
"""Legal values that are listed one by one; more are described by bounds alone."""

_TYPES: Final = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean"}


def describe(app: FastAPI, schema: RequestSchema | None) -> dict[str, Any]:
    """The document as of now; request bodies stay open objects until a model is known."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _set_body(document, "/v1/videos", schema, "video", form=True)
    _set_body(document, "/v1/images/generations", schema, "image", form=False)
    for path in ("/v1/videos/{video_id}/content", "/v1/files/{name}"):
        _set_media(document["paths"][path]["get"])
    return document


def _set_body(document: dict[str, Any], path: str, schema: RequestSchema | None, output: Output, *, form: bool) -> None:
    name = f"{output.capitalize()}Request"
    document["components"]["schemas"][name] = request_body(schema, output)
    reference = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    content = {"application/json": reference}
    if form:
        content["multipart/form-data"] = reference
    document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}


def _set_media(operation: dict[str, Any]) -> None:
    binary = {"schema": {"type": "string", "format": "binary"}}
    media = dict.fromkeys(("video/mp4", "image/png", "image/jpeg", "image/webp"), binary)
    operation["responses"]["200"] = {"description": "The whole file.", "content": media}
    part = {**media, "multipart/byteranges": binary}
    operation["responses"]["206"] = {"description": "The byte ranges that were asked for.", "content": part}
    operation.setdefault("parameters", []).append(
        {"name": "Range", "in": "header", "required": False, "schema": {"type": "string"}, "example": "bytes=0-1023"}
    )


def request_body(schema: RequestSchema | None, output: Output) -> dict[str, Any]:
    """JSON Schema of a request for ``output``."""
    if schema is None:
        return {"type": "object", "description": "No model is known yet.", "required": ["prompt"]}
    params = accepted(schema, output)
    properties = {name: _property(param) for name, param in params.items()}
    names = spoken(schema, output)
    properties["model"] = _nullable({"type": "string", "enum": list(model_names(schema))})
    exclusive: list[list[str]] = []
    if "size" in names:
        properties["size"] = _nullable({"type": "string", "pattern": _size_pattern(params), "example": "832x480"})
        exclusive += [["size", "width"], ["size", "height"]]
    if "seconds" in names:
        properties["seconds"] = _nullable(_seconds(params))
        exclusive.append(["seconds", "num_frames"])
    if "input_reference" in names:
        properties["input_reference"] = {"type": "string", "format": "binary"}
    if "response_format" in names:
        properties["response_format"] = _nullable({"type": "string", "enum": list(RESPONSE_FORMATS)})
    body: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": sorted(name for name, param in params.items() if param.required),
        "additionalProperties": False,
    }
    if exclusive:
        body["not"] = {"anyOf": [{"required": pair} for pair in exclusive]}
    return body


def _property(param: Param) -> dict[str, Any]:
    match param.type:
        case "image":
            return {"type": "string", "format": "binary"}
        case "images":
            return {"type": "array", "items": {"type": "string", "format": "binary"}}
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
            found["pattern"] = r"\S"
    values = legal_values(param)
    if values is not None:
        found["enum"] = values
    else:
        found |= _bounds(param)
    return found if param.required else _nullable(found)


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


def _size_pattern(params: dict[str, Param]) -> str:
    sides: list[str] = []
    for name in ("width", "height"):
        values = legal_values(params[name])
        sides.append(r"\d{1,5}" if values is None else f"({'|'.join(map(str, values))})")
    return f"^{sides[0]}x{sides[1]}$"


def _seconds(params: dict[str, Param]) -> dict[str, Any]:
    frames, fps = params["num_frames"], params["fps"].default
    text = "Length of the clip; becomes the nearest number of frames that the model can make."
    number: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
    if isinstance(fps, int | float) and fps and frames.maximum is not None:
        number["maximum"] = frames.maximum / fps
    return {"description": text, "anyOf": [number, {"type": "string", "pattern": r"^\d{1,4}(\.\d{1,3})?$"}]}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, or null: "not given"."""
    return {"anyOf": [schema, {"type": "null"}]}
