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

_FILE: Final = {"type": "string", "format": "binary"}
_PICTURES: Final = "image/png, image/jpeg, image/webp"

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
    _set_body(document, "/v1/videos", schema, "video")
    for path in ("/v1/images/generations", "/v1/images/edits"):
        _set_body(document, path, schema, "image")
    for path in ("/v1/videos/{video_id}/content", "/v1/files/{name}"):
        _set_media(document["paths"][path]["get"])
    return document


def _set_body(document: dict[str, Any], path: str, schema: RequestSchema | None, output: Output) -> None:
    content: dict[str, Any] = {}
    for kind, form in (("application/json", False), ("multipart/form-data", True)):
        body = request_body(schema, output, form=form)
        if body is not None:
            name = f"{output.capitalize()}{'Form' if form else 'Request'}"
            document["components"]["schemas"][name] = body
            content[kind] = {"schema": {"$ref": f"#/components/schemas/{name}"}}
            files = [field for field, found in body["properties"].items() if found == _FILE]
            if files:
                content[kind]["encoding"] = {field: {"contentType": _PICTURES} for field in files}
    document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}


def _set_media(operation: dict[str, Any]) -> None:
    binary = {"schema": _FILE}
    media = dict.fromkeys(("video/mp4", "image/png", "image/jpeg", "image/webp"), binary)
    operation["responses"]["200"] = {"description": "The whole file.", "content": media}
    part = {**media, "multipart/byteranges": binary}
    operation["responses"]["206"] = {"description": "The byte ranges that the Range header named.", "content": part}


def request_body(schema: RequestSchema | None, output: Output, *, form: bool) -> dict[str, Any] | None:
    """JSON Schema of a request for ``output``; None when it cannot be sent that way, because it must carry a file."""
    if schema is None:
        about = "No model is known yet."
        return {"type": "object", "description": about, "properties": {}, "required": ["prompt"]}
    params = accepted(schema, output)
    pictures = {name for name, param in params.items() if param.type in ("image", "images")}
    if not form and any(params[name].required for name in pictures):
        return None
    properties = {name: _property(param) for name, param in params.items() if name not in pictures}
    properties |= _spoken(schema, output, params, form=form)
    exclusive = [["size", "width"], ["size", "height"], ["seconds", "num_frames"]]
    required = sorted(name for name, param in params.items() if param.required and name not in pictures)
    body: dict[str, Any] = {"type": "object", "required": required, "additionalProperties": False}
    if form:
        for name in pictures:
            properties[name] = _property(params[name])
            exclusive.append(["input_reference", name])
            if params[name].required:
                body["anyOf"] = [{"required": ["input_reference"]}, {"required": [name]}]
        if pictures:
            properties["input_reference"] = _FILE
    else:
        # A form has no way to say null.
        properties = {name: found if name in required else _nullable(found) for name, found in properties.items()}
    pairs = [{"required": pair} for pair in exclusive if set(pair) <= properties.keys()]
    return body | {"properties": properties} | ({"not": {"anyOf": pairs}} if pairs else {})


def _spoken(schema: RequestSchema, output: Output, params: dict[str, Param], *, form: bool) -> dict[str, Any]:
    """The fields that go by OpenAI's names."""
    names = spoken(schema, output)
    found: dict[str, Any] = {"model": {"type": "string", "enum": list(model_names(schema))}}
    if "size" in names:
        found["size"] = {"type": "string", "pattern": _size_pattern(params), "example": "832x480"}
    if "seconds" in names:
        found["seconds"] = _seconds(params, form=form)
    if "response_format" in names:
        found["response_format"] = {"type": "string", "enum": list(RESPONSE_FORMATS)}
    return found


def _property(param: Param) -> dict[str, Any]:
    match param.type:
        case "image":
            return _FILE
        case "images":
            return {"type": "array", "items": _FILE}
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
    return found


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


def _seconds(params: dict[str, Param], *, form: bool) -> dict[str, Any]:
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


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, or null: "not given"."""
    return {"anyOf": [schema, {"type": "null"}]}
