"""From the fields of a request to an order: the pipeline's parameters, checked, with every default filled in.

Clients speak OpenAI's names, pipelines their own. ``size`` becomes width and height, ``seconds`` becomes num_frames,
``input_reference`` becomes image; every other field has the pipeline's name already. ``null`` means "not given".
Nothing here leaves the process: what is refused here never reaches an instance.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from triptych.api.aspect import has_own_size, sides_of_picture
from triptych.api.body import Body
from triptych.api.clips import clip_length
from triptych.api.errors import BodyTooLarge, ModelNotFound
from triptych.api.pictures import Size
from triptych.api.timeouts import TIMEOUTS, Timeouts
from triptych.api.unasked import without_unasked
from triptych.api.validation import bounded, check, check_sides, nearest, read_number, read_text, refuse, unknown_fields
from triptych.core.cost import staged_bytes
from triptych.errors import BadRequest
from triptych.ids import Role
from triptych.wire.schema import Param, RequestSchema

Output: TypeAlias = Literal["video", "image"]

FORMATS: Final[Mapping[Output, tuple[str, ...]]] = {"video": ("mp4",), "image": ("png", "jpeg", "webp")}
"""Output to the formats that it can be had in; the first is the default."""

PICTURE_ALIASES: Final[Mapping[str, str]] = {"last_frame": "last_image", "mask": "mask_image"}
"""Clients' names of pictures to the pipelines', for models that do not have a parameter of the clients' name."""

_THINGS: Final[Mapping[str, str]] = {
    "prompt": "prompt",
    "negative_prompt": "negative prompt",
    "input_reference": "image",
    "image": "image",
    "last_frame": "last frame",
    "last_image": "last frame",
    "mask": "mask",
    "mask_image": "mask",
    "strength": "strength",
}
"""Fields that some models take, in words."""

MEDIA: Final = ("image", "images", "video")
"""Types of parameters that are files."""

RESPONSE_FORMATS: Final = ("url", "b64_json")

_FRESH_SEED_LIMIT: Final = 2**32
"""Seeds that we draw stay below it, so that every JSON reader can repeat them exactly."""

_SIZE = re.compile(r"(\d{1,6})[xX](\d{1,6})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A request that may be submitted."""

    params: dict[str, Any]
    images: tuple[bytes, ...]
    model: str
    """As the client named it."""
    size: str
    """WIDTHxHEIGHT; empty when the model has no such parameters."""
    seconds: str
    """Length of the clip; empty for an image."""
    response_format: str
    count: int
    """Images wanted, or videos."""
    timeouts: Timeouts | None = None
    """None: the server's own."""


def accepted(schema: RequestSchema, output: Output) -> dict[str, Param]:
    """What a request for ``output`` may set under the pipeline's own names, with all bounds in place."""
    params = {p.name: bounded(p) for p in schema.params}
    if output == "image":
        params.pop("num_frames", None)
        params.pop("fps", None)
    declared = params.get("n")
    most = 1 if output == "video" and declared is None else 10  # images can be made by a job each
    if declared is not None and declared.maximum is not None:
        most = min(most, int(declared.maximum))
    params["n"] = Param(name="n", type="integer", default=1, minimum=1, maximum=most)
    formats = FORMATS[output]
    declared = params.get("output_format")
    if declared is not None and declared.choices:
        formats = tuple(f for f in formats if f in declared.choices) or formats
    params["output_format"] = Param(name="output_format", type="string", default=formats[0], choices=formats)
    return params


def spoken(schema: RequestSchema, output: Output) -> set[str]:
    """Every field name that a request for ``output`` may carry."""
    params = accepted(schema, output)
    names = {"model", *TIMEOUTS, *params}
    if {"width", "height"} <= params.keys():
        names.add("size")
    if {"num_frames", "fps"} <= params.keys():
        names.add("seconds")
    names.update(picture_fields(schema, output))
    if output == "image":
        names.add("response_format")
    return names


def read_order(
    schema: RequestSchema, body: Body, output: Output, *, sizes: Mapping[str, Sequence[Size | None]] | None = None
) -> Order:
    """The order that ``body`` stands for; raises `BadRequest` (or kin) at the first thing wrong with it. Its pictures
    were checked (`Darkroom`) or stand for others.

    ``sizes`` of them, by field, None for a clip: where no size is given, the picture to start from gives the shape.
    """
    if output == "video" and schema.output == "image":
        raise BadRequest("model", f"model {schema.model!r} makes images; use POST /v1/images/generations")
    body = without_unasked(schema, body, output)
    given = {name: value for name, value in body.fields.items() if value is not None}
    model = _model(schema, given.pop("model", None))
    params = accepted(schema, output)
    _known_only(schema, output, [*body.fields, *body.uploads])
    response_format = _response_format(given.pop("response_format", None))
    values = _size(params, given)
    duration = given.pop("seconds", None)
    uploads = _uploads(params, picture_fields(schema, output), body.uploads)
    for name, value in given.items():
        values[name] = check(params[name], value, form=body.form)
    seconds = ""
    if duration is not None:
        values["num_frames"], seconds = _frames(params, values, duration, form=body.form)
    count = int(values.pop("n", 1))
    pictures, images = _pictures(uploads)
    values.update(pictures)
    if sizes is not None:
        values |= _picture_sides(params, values, [size for name in uploads for size in sizes[name]])
    _fill(params, values)
    if schema.param("n") is not None:
        values["n"] = count
    completed = _complete(schema, values, output)
    if (objection := schema.objection(completed)) is not None:
        raise BadRequest(objection.field, objection.message)
    _check_clips(params, completed, images)
    return Order(
        params=completed,
        images=images,
        model=model,
        size=f"{values['width']}x{values['height']}" if {"width", "height"} <= values.keys() else "",
        seconds=seconds or _seconds(values),
        response_format=response_format,
        count=count,
    )


def _model(schema: RequestSchema, value: Any) -> str:
    names = schema.names
    if value is None:
        return names[-1]
    name = read_text("model", value, 1024)
    if name not in names:
        raise ModelNotFound("model", f"model={name[:60]!r} is not served here; served: {', '.join(names)}")
    return name


def _known_only(schema: RequestSchema, output: Output, names: list[str]) -> None:
    known = spoken(schema, output)
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if not unknown:
        return
    absent = {name: f"model {schema.model!r} ({schema.task}) takes no {thing}" for name, thing in _THINGS.items()}
    if len(unknown) == 1 and unknown[0] in absent:
        raise BadRequest(unknown[0], f"{unknown[0]}: {absent[unknown[0]]}")
    raise unknown_fields(unknown, known, absent)


def _response_format(value: Any) -> str:
    if value is None:
        return RESPONSE_FORMATS[0]
    if value not in RESPONSE_FORMATS:
        refuse("response_format", value, f"one of {', '.join(RESPONSE_FORMATS)}")
    return value


def _size(params: Mapping[str, Param], given: dict[str, Any]) -> dict[str, Any]:
    """Width and height out of ``size``, if that is given. Errors speak of the field that the client used."""
    value = given.pop("size", None)
    if value is None:
        return {}
    for name in ("width", "height"):
        if name in given:
            raise BadRequest("size", f"size={str(value)[:20]!r} and {name} are both given; give one of them")
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        refuse("size", value, "WIDTHxHEIGHT in pixels, e.g. '832x480'")
    sides = {"width": int(found[1]), "height": int(found[2])}
    check_sides("size", value, params, sides)
    return sides


def _frames(params: Mapping[str, Param], values: Mapping[str, Any], duration: Any, *, form: bool) -> tuple[int, str]:
    """The legal number of frames closest to ``duration`` seconds, and the duration as the client wrote it.

    Whole seconds may be text in JSON too, as OpenAI's clients send them.
    """
    if "num_frames" in values:
        raise BadRequest("seconds", "seconds and num_frames are both given; give one of them")
    whole = isinstance(duration, str) and duration.isascii() and duration.isdecimal()
    seconds = read_number("seconds", duration, form=form or whole)
    fps = values.get("fps", params["fps"].default)
    if not fps:
        raise BadRequest("fps", "fps: is needed where seconds is given; this model has no default")
    frames = params["num_frames"]
    assert frames.maximum is not None  # the house's bounds see to it
    if not 0 < seconds * fps <= frames.maximum:
        longest = math.floor(1e4 * frames.maximum / fps) / 1e4  # rounded down: what is named is taken
        refuse("seconds", duration, f"more than 0 and at most {longest:.10g} at {fps:g} fps")
    return nearest(frames, seconds * fps), f"{seconds:g}"


def _seconds(values: Mapping[str, Any]) -> str:
    frames, fps = values.get("num_frames"), values.get("fps")
    return f"{frames / fps:g}" if frames and fps else ""


def picture_params(schema: RequestSchema, output: Output) -> list[str]:
    """Names of the parameters that take pictures; the first is what ``input_reference`` stands for."""
    return [p.name for p in accepted(schema, output).values() if p.type in MEDIA]


def picture_fields(schema: RequestSchema, output: Output) -> dict[str, str]:
    """Every field that gives a picture, and the parameter that it fills."""
    names = picture_params(schema, output)
    found = {"input_reference": names[0]} if names else {}
    return found | {spoken: own for spoken, own in PICTURE_ALIASES.items() if own in names} | {n: n for n in names}


def clip_fields(schema: RequestSchema, output: Output) -> set[str]:
    """Those of them that take clips too."""
    params = accepted(schema, output)
    return {field for field, name in picture_fields(schema, output).items() if params[name].type == "video"}


def _uploads(
    params: Mapping[str, Param], fields: Mapping[str, str], uploads: Mapping[str, list[bytes]]
) -> dict[str, tuple[Param, list[bytes]]]:
    """Field to the image parameter that it fills and its files."""
    found: dict[str, tuple[Param, list[bytes]]] = {}
    for name, files in uploads.items():
        if name not in fields:
            raise BadRequest(name, f"{name}: must be a plain field, not a file")
        param = params[fields[name]]
        most = 1 if param.type != "images" else param.max_length or len(files)
        if len(files) > most:
            raise BadRequest(name, f"{name}: has {len(files)} files; at most {most} accepted", code="duplicate_field")
        if any(other is param for other, _ in found.values()):
            raise BadRequest(name, f"{name}: {param.name} is given twice", code="duplicate_field")
        found[name] = (param, files)
    return found


def _pictures(uploads: Mapping[str, tuple[Param, list[bytes]]]) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Image parameters as references into the tuple of all files."""
    values: dict[str, Any] = {}
    blobs: list[bytes] = []
    for param, files in uploads.values():
        references = [{"blob": len(blobs) + i} for i in range(len(files))]
        values[param.name] = references if param.type == "images" else references[0]
        blobs.extend(files)
    return values, tuple(blobs)


def _picture_sides(
    params: Mapping[str, Param], values: Mapping[str, Any], sizes: Sequence[Size | None]
) -> dict[str, int]:
    """Height and width in the shape of the picture to start from, where there is one and nothing else gives them."""
    if not has_own_size(params) or not values.keys().isdisjoint(("height", "width")):
        return {}
    value = values.get(next((name for name, param in params.items() if param.type in MEDIA), ""))
    if value is None:
        return {}
    size = sizes[(value[0] if isinstance(value, list) else value)["blob"]]
    return {} if size is None else sides_of_picture(params, size)


def _fill(params: Mapping[str, Param], values: dict[str, Any]) -> None:
    """Defaults, and a seed of our own where none is given: another attempt elsewhere must make the same pixels."""
    for name, param in params.items():
        if name in values or name == "n":
            continue
        if param.required:
            raise BadRequest(name, f"{name}: is required", code="missing_field")
        if (default := param.default_beside(values)) is not None:
            values[name] = default
        elif name == "seed":
            values[name] = secrets.randbelow(_FRESH_SEED_LIMIT)


def _check_clips(params: Mapping[str, Param], values: Mapping[str, Any], files: Sequence[bytes]) -> None:
    """Refuse clips that are shorter than what is to be made of them."""
    for name, param in params.items():
        if name in values and param.type == "video" and "num_frames" in values:
            length = clip_length(files[values[name]["blob"]])
            if length is not None and length < values["num_frames"]:
                raise BadRequest(
                    name, f"{name}: the clip has {length} frames; num_frames={values['num_frames']} are asked for"
                )


def _complete(schema: RequestSchema, values: dict[str, Any], output: Output) -> dict[str, Any]:
    """``values`` with what the output fixes: an image is one frame."""
    frames = schema.param("num_frames")
    if output == "video" or frames is None:
        return values
    fixed: dict[str, Any] = {"num_frames": check(bounded(frames), 1, form=False)}
    fps = schema.param("fps")
    if fps is not None and fps.default is not None:
        fixed["fps"] = fps.default
    return {**values, **fixed}


def check_handoff(schema: RequestSchema, params: Mapping[str, Any], largest_pool: Callable[[Role], int | None]) -> None:
    """Refuse a request of which a stage makes more than any transfer pool of its role could hold.

    Nothing is said while either size is unknown. What counts is what grows with a request; an instance refuses the
    rest. A pool needs no room for what its instance pulls.
    """
    for role in (Role.ENCODER, Role.DENOISER):
        needed, pool_bytes = staged_bytes(schema, params, role), largest_pool(role)
        if pool_bytes is not None and needed > pool_bytes:
            raise BodyTooLarge(
                "size",
                f"the output of the {role} takes {needed} bytes for this request; the largest transfer pool of an "
                f"instance of that role has {pool_bytes} (--disagg-transfer-pool-size): ask for fewer frames or pixels",
            )
