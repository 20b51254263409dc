"""What a request may say that asks for nothing: a client that has to fill in every field, or writes out defaults.

Such a field counts as not given. Any other value of it is refused: it asks for something that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from triptych.api.body import Body
from triptych.api.validation import read_text, refuse
from triptych.wire.schema import RequestSchema

IMAGE_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": ("auto",),
    "input_fidelity": ("low",),
    "moderation": ("auto", "low"),
    "output_compression": (100,),
    "partial_images": (0,),
    "quality": ("auto", "standard"),
    "stream": (False,),
    "style": (),
}
"""Optional fields of OpenAI's images API for features that are not here, with the values that ask for none of them."""

USER: Final = "user"
"""Who is behind a request to OpenAI's images API, in the client's own words: it asks for nothing whatever it says."""
USER_CHARACTERS: Final = 512

AUTO: Final = "auto"
"""The size that OpenAI's clients write for the model's own."""


def is_no_prompt(schema: RequestSchema, name: str, value: Any) -> bool:
    """Whether a field is the empty prompt of a model that takes none: clients to whom a prompt is required have no
    other way to leave it out."""
    return name == "prompt" and value in ("", None) and schema.param(name) is None


def without_unasked(schema: RequestSchema, body: Body, output: Literal["video", "image"]) -> Body:
    """``body`` without the fields that ask for nothing; raises `BadRequest` for a known one that asks for something."""
    fields = dict(body.fields)
    for name, value in body.fields.items():
        if is_no_prompt(schema, name, value) or (output == "image" and _is_image_default(schema, body, name, value)):
            del fields[name]
    if fields.get("size") == AUTO and fields.keys().isdisjoint(("width", "height")):
        del fields["size"]
    return replace(body, fields=fields)


def _is_image_default(schema: RequestSchema, body: Body, name: str, value: Any) -> bool:
    if schema.param(name) is not None:
        return False
    if name == USER:
        if value is not None:
            read_text(name, value, USER_CHARACTERS)
        return True
    if name not in IMAGE_FIELDS:
        return False
    accepted = IMAGE_FIELDS[name]
    if value is None or any(_equal(value, one, form=body.form) for one in accepted):
        return True
    words = [*(str(one).lower() if isinstance(one, bool) else repr(one) for one in accepted), "left out"]
    refuse(name, value, f"{' or '.join(words)}: model {schema.model!r} is served without it")


def _equal(value: Any, one: Any, *, form: bool) -> bool:
    """As JSON has it: 0 is 0.0, but not false. A form has text for all of them."""
    if form:
        return value == (str(one).lower() if isinstance(one, bool) else str(one))
    return value == one and isinstance(value, bool) is isinstance(one, bool)
