"""The OpenAPI document, with request bodies that say what the served model accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from triptych.api.keys import OPEN
from triptych.api.openapi_params import (
    FILE,
    NO_PROMPT,
    REFERENCE,
    image_defaults,
    nullable,
    property_of,
    seconds_schema,
    size_pattern,
)
from triptych.api.openapi_tasks import KINDS, UNKNOWN, remix_body, task_body
from triptych.api.orders import MEDIA, RESPONSE_FORMATS, Output, accepted, picture_fields, picture_params, spoken
from triptych.api.timeouts import timeout_schemas
from triptych.wire.schema import Param, RequestSchema

_PICTURES: Final = "image/png, image/jpeg, image/webp"

_EDITS: Final = "/v1/images/edits"
"""Not in the document of a model that takes no pictures: no request would be accepted there."""

_MEDIA_PATHS: Final = (
    "/v1/videos/{video_id}/content",
    "/v1/files/{name}",
    "/v1/files/download/{name}",
    "/v1/tasks/{task_id}/result",
)
_TASK_PATHS: Final[dict[str, tuple[str, Output]]] = {
    "/v1/tasks/video/": ("VideoTask", "video"),
    "/v1/tasks/video/form": ("VideoTask", "video"),
    "/v1/tasks/image/": ("ImageTask", "image"),
    "/v1/tasks/image/form": ("ImageTask", "image"),
    "/v1/tasks/image/sync": ("SingleImageTask", "image"),
}
"""Path to the name of its body and what is made of that."""

_BODIES: Final = frozenset(
    f"{what}{form}"
    for what, forms in (
        ("Video", ("Request", "Form")),
        ("Image", ("Request", "Form")),
        ("ImageEdit", ("Request", "Form")),
        ("VideoTask", ("", "Form")),
        ("ImageTask", ("", "Form")),
        ("SingleImageTask", ("", "Form")),
        ("Remix", ("", "Form")),
    )
    for form in forms
)
"""Names of the bodies that start a job."""


_VALIDATION = "HTTPValidationError"


def describe(
    app: FastAPI, schema: RequestSchema | None, *, keys: bool, timeouts: Mapping[str, float]
) -> dict[str, Any]:
    """The document as of now; request bodies stay open objects until a model is known. ``keys``: keys are needed.

    ``timeouts``: the most seconds that a request may ask for, by field.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operations in document["paths"].values():
        for operation in operations.values():
            if _VALIDATION in str(operation["responses"].get("422")):  # FastAPI's own; here that is 400
                del operation["responses"]["422"]
    schemas = document["components"]["schemas"]
    for name in (_VALIDATION, "ValidationError"):
        schemas.pop(name, None)
    _set_body(document, "/v1/videos", schema, "video")
    _set_body(document, "/v1/images/generations", schema, "image")
    if schema is None or picture_params(schema, "image"):
        _set_body(document, _EDITS, schema, "image", edit=True)
    else:
        del document["paths"][_EDITS]
    for path, (name, output) in _TASK_PATHS.items():
        for kind, form in KINDS:
            body = task_body(schema, output, form=bool(form), single=path.endswith("/sync"))
            _set_content(document, path, kind, f"{name}{form}", body)
    for kind, form in KINDS:
        _set_content(document, "/v1/videos/{video_id}/remix", kind, f"Remix{form}", remix_body(schema, form=bool(form)))
    for path in _MEDIA_PATHS:
        _set_media(document["paths"][path]["get"])
    if schema is not None:
        for name in _BODIES & schemas.keys():
            body, limits = schemas[name], timeout_schemas(timeouts, form=name.endswith("Form"))
            schemas[name] = body | {"properties": body["properties"] | limits}
    if keys:
        _need_keys(document)
    return document


def _need_keys(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for path, operations in document["paths"].items():
        for operation in operations.values() if path not in OPEN else ():
            operation["security"] = [{"key": []}]
            operation["responses"]["401"] = {"description": "An API key is needed.", "content": body}


def _set_body(
    document: dict[str, Any], path: str, schema: RequestSchema | None, output: Output, *, edit: bool = False
) -> None:
    for kind, form in KINDS:
        body = request_body(schema, output, form=bool(form), edit=edit)
        _set_content(document, path, kind, f"{output.capitalize()}{'Edit' * edit}{form or 'Request'}", body)


def _set_content(document: dict[str, Any], path: str, kind: str, name: str, body: dict[str, Any]) -> None:
    """Name ``body`` as what ``path`` reads from this content type."""
    document["components"]["schemas"][name] = body
    content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    files = [field for field, found in body["properties"].items() if found == FILE]
    if files:
        content["encoding"] = {field: {"contentType": _PICTURES} for field in files}
    operation = document["paths"][path]["post"]
    operation.setdefault("requestBody", {"required": True, "content": {}})["content"][kind] = content


def _set_media(operation: dict[str, Any]) -> None:
    binary = {"schema": FILE}
    media = dict.fromkeys(("video/mp4", "image/png", "image/jpeg", "image/webp"), binary)
    operation["responses"]["200"] = {"description": "The whole file.", "content": media}
    part = {**media, "multipart/byteranges": binary}
    operation["responses"]["206"] = {"description": "The byte ranges that the Range header named.", "content": part}
    operation["responses"]["304"] = {"description": "The client has the file already, says its If-None-Match header."}


def request_body(schema: RequestSchema | None, output: Output, *, form: bool, edit: bool = False) -> dict[str, Any]:
    """JSON Schema of a request for ``output``, as a form or as JSON; of an ``edit``, which has a picture."""
    if schema is None:
        return UNKNOWN
    params = accepted(schema, output)
    pictures = [name for name, param in params.items() if param.type in MEDIA]
    properties = {name: property_of(param, form=form) for name, param in params.items()}
    properties |= _spoken(schema, output, params, form=form)
    exclusive = [["size", "width"], ["size", "height"], ["seconds", "num_frames"]]
    required = sorted(name for name, param in params.items() if param.required and name not in pictures)
    body: dict[str, Any] = {"type": "object", "required": required, "additionalProperties": False}
    if pictures:
        first = pictures[0]
        for name, own in picture_fields(schema, output).items():
            if name not in params:
                properties[name] = FILE if form else REFERENCE
                exclusive.append([name, own])
        needed = ["input_reference", first] if params[first].required else picture_fields(schema, output)
        if params[first].required or edit:
            body["anyOf"] = [{"required": [name], "properties": {name: properties[name]}} for name in needed]
    if not form:  # a form has no way to say null
        properties = {name: found if name in required else nullable(found) for name, found in properties.items()}
    pairs = [{"required": pair} for pair in exclusive if set(pair) <= properties.keys()]
    return body | {"properties": properties} | ({"not": {"anyOf": pairs}} if pairs else {})


def _spoken(schema: RequestSchema, output: Output, params: dict[str, Param], *, form: bool) -> dict[str, Any]:
    """The fields that go by OpenAI's names."""
    names = spoken(schema, output)
    found: dict[str, Any] = {"model": {"type": "string", "enum": list(schema.names)}}
    if "size" in names:
        found["size"] = {"type": "string", "pattern": size_pattern(params), "example": "832x480"}
    if "seconds" in names:
        found["seconds"] = seconds_schema(params, form=form)
    if "prompt" not in params:
        found["prompt"] = NO_PROMPT
    if "response_format" in names:
        found["response_format"] = {"type": "string", "enum": list(RESPONSE_FORMATS)}
    if output == "image":
        found |= image_defaults(params, form=form)
    return found
