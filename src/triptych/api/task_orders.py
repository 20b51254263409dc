"""The fields of the Task API in terms of the house's own: which become what, which ask for nothing, which are refused.

Names of the pipeline itself are accepted too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, cast

from triptych.api.aspect import ADAPTIVE, has_own_size, sides_of
from triptych.api.body import Body
from triptych.api.idempotency import canonical
from triptych.api.orders import Output, accepted, picture_params
from triptych.api.timeouts import TIMEOUTS
from triptych.api.unasked import is_no_prompt
from triptych.api.validation import (
    check_sides,
    read_integer,
    read_number,
    read_text,
    refuse,
    unknown_fields,
)
from triptych.errors import BadRequest
from triptych.ids import MAX_ADAPTER_SCALE
from triptych.server.records import IdMint
from triptych.wire.schema import RequestSchema

LORA: Final = "lora"
"""The house's name of the field that names adapters."""
RENAMED: Final[Mapping[str, str]] = {
    "infer_steps": "num_inference_steps",
    "target_video_length": "num_frames",
    "target_fps": "fps",
    "lora_name": LORA,
}
PICTURES: Final[Mapping[str, str]] = {
    "image_path": "",
    "image_file": "",
    "last_frame_path": "last_image",
    "last_frame_file": "last_image",
    "image_mask_path": "mask_image",
    "image_mask_file": "mask_image",
}
"""Field to the parameter of the picture that it gives; none is named for the one to start from."""
_WORDS: Final[Mapping[str, str]] = {"last_image": "last frame", "mask_image": "mask"}
TASK_FIELDS: Final = frozenset({"task_id", "save_result_path", "target_shape", "aspect_ratio"})

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "use_prompt_enhancer": (False, "false"),
    "num_fragments": (1, "1"),
    "audio_path": ("",),
    "audio_file": (),
    "video_duration": (5, "5"),
    "talk_objects": ([],),
    ADAPTIVE: ("adaptive",),  # which asks for something where there is a picture: `TaskFields.adaptive`
    "presigned_url": ("",),
    "lora_name": ("",),
    "lora_strength": (1, "1", "1.0"),
    "task_id_must_unique": (True, False, "true", "false"),
}
"""Fields of features that are not here, with the values that ask for nothing; others are refused, never ignored."""

EMPTY: Final[Mapping[str, Any]] = {
    "task_id": "",
    "save_result_path": "",
    "negative_prompt": "",
    "image_path": "",
    "last_frame_path": "",
    "image_mask_path": "",
    "aspect_ratio": "",
    "target_shape": [],
}
"""Fields whose empty value means "not given", as clients of this API write it."""

SUFFIXES: Final[Mapping[Output, Mapping[str, str]]] = {
    "video": {".mp4": "mp4"},
    "image": {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"},
}
"""File name suffix to output format."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_PATHS: Final = ("queue",)
"""Ids whose status could not be asked for, because `/v1/tasks/ID/status` is something else."""
_RATIO = re.compile(r"(\d{1,4})\s*[:x/]\s*(\d{1,4})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFields:
    """A request of the Task API in two parts: what makes an order, and what concerns the task alone."""

    body: Body
    names: Mapping[str, str]
    """The house's name of a field to the one that the client used."""
    task_id: str | None
    save_path: str
    """Relative path under the output folder; empty when none was given."""
    adaptive: bool
    """Whether the picture gives the shape where no size is given."""
    digest: str
    """Of everything in the request but the task's id: equal requests have equal digests."""


def read_fields(schema: RequestSchema, body: Body, output: Output) -> TaskFields:
    """Take a request apart. Raises `BadRequest` that names the client's field."""
    given = {
        name: value
        for name, value in body.fields.items()
        if not _is_empty(name, value, form=body.form) and not is_no_prompt(schema, name, value)
    }
    task_id = given.pop("task_id", None)
    if task_id is not None and not (isinstance(task_id, str) and _ID.fullmatch(task_id)):
        refuse("task_id", task_id, "up to 128 letters, digits, '-', '_' and '.'")
    if task_id is not None and (task_id in _PATHS or any(IdMint.is_id(task_id, kind) for kind in SUFFIXES)):
        refuse("task_id", task_id, "none of the names and forms of name that are the server's own")
    digest = _digest(output, given, body.uploads)
    adaptive = given.get(ADAPTIVE) == "adaptive"
    _read_adapters(schema, given)
    _refuse_absent(schema, given, body.uploads)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    save_path = _save_path(given.pop("save_result_path", None), output)
    spoken, shape = _shape(schema, output, given, form=body.form)
    uploads: dict[str, list[bytes]] = {}
    for name, value in shape.items():
        _place(fields, names, name, spoken, value)
    if shape:
        names["size"] = spoken  # in which the order speaks of both sides together
    read = {*PICTURES, *RENAMED, *accepted(schema, output), "model", "size", *TIMEOUTS}
    unknown = [name for name in dict.fromkeys((*given, *body.uploads)) if name not in read]
    if unknown:
        raise unknown_fields(unknown, known_fields(schema, output))
    for name, value in given.items():
        _place(fields, names, _target(schema, output, name), name, value)
    for name, files in body.uploads.items():
        _place(uploads, names, _target(schema, output, name), name, files)
    kind = SUFFIXES[output].get(PurePosixPath(save_path).suffix.lower())
    if kind is not None and fields.setdefault("output_format", kind) != kind:
        raise BadRequest("output_format", f"output_format: is not that of save_result_path={save_path[:60]!r}")
    return TaskFields(
        body=Body(fields=fields, uploads=uploads, form=body.form),
        names=names,
        task_id=task_id,
        save_path=save_path,
        adaptive=adaptive,
        digest=digest,
    )


def in_client_words(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """``error`` with the field under the name that the client used."""
    spoken = names.get(error.field or "")
    if spoken is None or error.field is None or spoken == error.field:
        return error
    message = error.message.replace(error.field, spoken, 1)
    renamed = type(error)(spoken, message, code=error.error_code)
    renamed.__cause__ = error
    return renamed


def _is_empty(name: str, value: Any, *, form: bool) -> bool:
    return value is None or (name in EMPTY and (value == EMPTY[name] or (form and value == "")))


def _digest(output: Output, given: Mapping[str, Any], uploads: Mapping[str, list[bytes]]) -> str:
    files = {name: [hashlib.sha256(data).hexdigest() for data in group] for name, group in uploads.items()}
    return hashlib.sha256(canonical([output, given, files])).hexdigest()


def _refuse_absent(schema: RequestSchema, given: dict[str, Any], uploads: Mapping[str, Any]) -> None:
    """Drop what asks for nothing; refuse what asks for something that is not here."""
    for name, neutral in NEUTRAL.items():
        if schema.param(RENAMED.get(name, name)) is not None:
            continue
        if name in uploads or (name in given and not _is_one_of(given.pop(name), neutral)):
            raise BadRequest(
                name, f"{name}: model {schema.model!r} is served without it; leave it out", code="unsupported"
            )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """As JSON has it: 1 is 1.0, but not true."""
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in values)


def _read_adapters(schema: RequestSchema, given: dict[str, Any]) -> None:
    """``lora_name`` and ``lora_strength`` as the one field that names adapters, where the model is served with any.

    The strength is that of every name that has none of its own (``NAME:STRENGTH``).
    """
    if schema.param(LORA) is None:
        return
    name, strength = given.pop("lora_name", None), given.pop("lora_strength", None)
    if strength is not None:
        strength = float(read_number("lora_strength", strength, form=True))
        if abs(strength) > MAX_ADAPTER_SCALE:
            refuse("lora_strength", strength, f"within {MAX_ADAPTER_SCALE:g} of 0")
    if name in ("", None):
        if strength not in (1, None):
            raise BadRequest("lora_strength", f"lora_strength={strength:g}: is of no use without lora_name")
        return
    if LORA in given:
        raise BadRequest("lora_name", f"{LORA} and lora_name are both given; give one of them", code="duplicate_field")
    if strength is not None and isinstance(name, str):
        name = ",".join(one if ":" in one else f"{one.strip()}:{strength!r}" for one in name.split(","))
    given["lora_name"] = name


def _place(target: dict[str, Any], names: dict[str, str], name: str, spoken: str, value: Any) -> None:
    if name in target:
        raise BadRequest(spoken, f"{spoken} and {names[name]} are both given; give one of them", code="duplicate_field")
    target[name] = value
    names[name] = spoken


def _target(schema: RequestSchema, output: Output, name: str) -> str:
    """The house's name of a field."""
    if name not in PICTURES:
        return RENAMED.get(name, name)
    pictures = picture_params(schema, output)
    own = PICTURES[name] or next((p for p in pictures if p not in _WORDS), "")
    if own not in pictures:
        what = _WORDS.get(own, "image")
        raise BadRequest(name, f"{name}: model {schema.model!r} ({schema.task}) takes no {what}")
    return own


def known_fields(schema: RequestSchema, output: Output) -> set[str]:
    """Every field that a task may carry."""
    params = accepted(schema, output)
    old = {spoken for spoken, name in RENAMED.items() if name in params}
    pictures = picture_params(schema, output)
    old |= {spoken for spoken, own in PICTURES.items() if (own in pictures if own else bool(pictures))}
    return {"model", "size", *TIMEOUTS, *params, *old, *TASK_FIELDS}


def _save_path(value: Any, output: Output) -> str:
    if value is None:
        return ""
    text = read_text("save_result_path", value, 512)
    parts = text.split("/")
    path = PurePosixPath(text)
    if path.is_absolute() or "\\" in text or ":" in text or not text.isprintable() or not path.parts:
        refuse("save_result_path", text, "a relative path in the output folder")
    if any(part in ("", ".", "..") or part.startswith(".") or len(part.encode()) > 200 for part in parts):
        refuse("save_result_path", text, "a relative path in the output folder, without '..' and hidden names")
    suffix = path.suffix.lower()
    if suffix and suffix not in SUFFIXES[output]:
        refuse("save_result_path", text, f"a name that ends in {', '.join(SUFFIXES[output])} or has no suffix")
    return text


def _shape(schema: RequestSchema, output: Output, given: dict[str, Any], *, form: bool) -> tuple[str, dict[str, int]]:
    """Height and width out of ``target_shape`` or ``aspect_ratio``, which leave ``given``, and which of them it was."""
    shape, ratio = given.pop("target_shape", None), given.pop("aspect_ratio", None)
    if shape is not None and ratio is not None:
        raise BadRequest("aspect_ratio", "aspect_ratio and target_shape are both given; give one of them")
    params = accepted(schema, output)
    if (shape or ratio) and not {"height", "width"} <= params.keys():
        name = "target_shape" if shape else "aspect_ratio"
        raise BadRequest(name, f"{name}: model {schema.model!r} makes one size only")
    if shape is not None:
        values = cast("list[Any]", shape) if isinstance(shape, list) else str(shape).strip("[] ").split(",")
        if len(values) != 2:
            refuse("target_shape", str(shape), "[height, width]")
        sides = {
            name: read_integer("target_shape", side, form=form)
            for name, side in zip(("height", "width"), values, strict=True)
        }
        check_sides("target_shape", list(sides.values()), params, sides)
        return "target_shape", sides
    if ratio is None:
        return "", {}
    found = _RATIO.fullmatch(ratio) if isinstance(ratio, str) else None
    if found is None or not int(found[1]) or not int(found[2]):
        refuse("aspect_ratio", ratio, "WIDTH:HEIGHT, e.g. '16:9'")
    if not has_own_size(params):
        raise BadRequest("aspect_ratio", f"aspect_ratio: {schema.model!r} has no size of its own; give target_shape")
    return "aspect_ratio", sides_of(params, int(found[1]) / int(found[2]))
