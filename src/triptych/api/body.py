"""Request bodies as plain fields: strict JSON, or multipart form data with uploads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

from anyio import to_thread
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.requests import Request

from triptych.api.errors import WrongMediaType
from triptych.api.idempotency import has_key, remember_body
from triptych.errors import BadRequest

MAX_FIELDS = 64
MAX_FILES = 8
MAX_PART = 1 << 30
"""The gate bounds the whole body; a field of text may be a picture as a data URL and take nearly all of it."""
MAX_MARKS = 1 << 16
"""Commas and opening brackets of a JSON body: what its values are counted by before it is parsed, so that nobody gets
millions of objects for his megabytes."""
MAX_ESCAPES = 1 << 20
"""Backslashes of a JSON body. Some clients escape every slash of a picture in base64, which has half a million."""
SMALL = 32 << 10
"""Bytes of a JSON body that is parsed where it arrives; a thread is worth its while for more."""
ACCEPTED = "application/json or multipart/form-data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """The fields of one request, not yet validated."""

    fields: dict[str, Any]
    """Text that a form gives several times under one name is a list; `refuse_repeated` is for what takes none."""
    uploads: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    """Field name to the contents of its files; client file names are dropped here and used nowhere."""
    form: bool = False
    """Values came as text, so that "20" may be an integer."""


async def read_body(request: Request) -> Body:
    """The body of ``request``. Raises `BadRequest` or one of its kin."""
    body = await _read(request)
    if has_key(request):
        await to_thread.run_sync(remember_body, request, body.fields, body.uploads)
    return body


async def _read(request: Request) -> Body:
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        raise WrongMediaType("Content-Encoding", f"Content-Encoding={coding[:80]!r}: bodies are taken as they are only")
    header = request.headers.get("content-type", "")
    kind = parse_options_header(header)[0]
    if kind == b"application/json":
        data = await request.body()
        return Body(fields=parse_json(data) if len(data) <= SMALL else await to_thread.run_sync(parse_json, data))
    if kind == b"multipart/form-data":
        return await _read_form(request)
    raise WrongMediaType("Content-Type", f"Content-Type={header[:80]!r}: must be {ACCEPTED}")


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``; NaN, infinities and repeated keys are refused, and bodies of so many parts that
    parsing them would take the machine from others: the interpreter does one thing at a time, in threads too."""
    _check_parts(data)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(
            None, f"the body is not UTF-8: {error.reason} at byte {error.start}", code="bad_json"
        ) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadRequest(None, f"the body is not JSON: {error.msg} at {where}", code="bad_json") from error
    except RecursionError as error:
        raise BadRequest(None, "the body is nested too deeply", code="bad_json") from error
    except ValueError as error:  # an integer of thousands of digits
        raise BadRequest(None, f"the body holds a number that cannot be read: {error}", code="bad_json") from error
    if not isinstance(value, dict):
        raise BadRequest(None, f"the body is a JSON {_json_kind(value)}; it must be an object", code="bad_json")
    return value


def _check_parts(data: bytes) -> None:
    if len(data) <= MAX_MARKS:
        return
    for kinds, most, what in ((b",{[", MAX_MARKS, "commas and brackets"), (b"\\", MAX_ESCAPES, "backslashes")):
        count = sum(data.count(kind) for kind in kinds)
        if count > most:
            raise BadRequest(None, f"the body has {count} {what}; at most {most} are accepted", code="bad_json")


def _json_kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case _:
            return "array"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise given_twice(name)
            seen.add(name)
    return result


def given_twice(name: str) -> BadRequest:
    """The error of a field that a body has more than once."""
    return BadRequest(name[:60], f"{name[:60]}: given more than once", code="duplicate_field")


def _no_constant(name: str) -> NoReturn:
    raise BadRequest(None, f"the body is not JSON: {name} is not a JSON number", code="bad_json")


async def _read_form(request: Request) -> Body:
    texts: dict[str, list[str]] = {}
    uploads: dict[str, list[bytes]] = {}
    async with request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_PART) as form:
        for name, value in form.multi_items():
            # How a form says {"image_url": ...}, and how OpenAI's clients write a field of which they send a list.
            name = name.removesuffix("[image_url]").removesuffix("[]")
            if isinstance(value, UploadFile):
                uploads.setdefault(name, []).append(await value.read())
            else:
                texts.setdefault(name, []).append(value)
    both = texts.keys() & uploads.keys()
    if both:
        raise given_twice(min(both))
    fields = {name: values if len(values) > 1 else values[0] for name, values in texts.items()}
    return Body(fields=fields, uploads=uploads, form=True)


def refuse_repeated(body: Body) -> None:
    """Raise `BadRequest` for text that a form gives more than once, where no field is left that may be a list."""
    for name, value in body.fields.items() if body.form else ():
        if isinstance(value, list):
            raise given_twice(name)
