"""One request value against one declared parameter: type, bounds, divisibility, choices, lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, NoReturn, assert_never

import msgspec

from triptych.errors import BadRequest
from triptych.wire.adapters import read_adapters
from triptych.wire.schema import Param

INT64_MAX: Final = 2**63 - 1
"""The largest integer that travels on the wire, and the largest seed."""

_CAPS: Final[dict[str, tuple[float | None, float | None]]] = {
    "height": (1, 16384),
    "width": (1, 16384),
    "num_frames": (1, 4096),
    "fps": (1, 240),
    "num_inference_steps": (1, 1000),
    "guidance_scale": (0, 1000),
    "strength": (0, 1),
    "max_sequence_length": (1, 65536),
    "seed": (0, INT64_MAX),
    "n": (1, 10),
}
"""Bounds that hold where a model declares none, so that no request can ask for the absurd."""

_PROMPTS: Final = ("prompt", "negative_prompt")
_PROMPT_CHARACTERS: Final = 32_000
ADAPTER_CHARACTERS: Final = 2_000

_INTEGER = re.compile(r"[+-]?\d{1,20}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d{1,20}(\.\d{0,20})?|\.\d{1,20})([eE][+-]?\d{1,3})?", re.ASCII)


_MOST_NAMED: Final = 16
"""Unknown fields that one error names."""


def bounded(param: Param) -> Param:
    """``param`` with the house's bounds wherever the model left one open."""
    minimum, maximum = _CAPS.get(param.name, (None, None))
    length = _PROMPT_CHARACTERS if param.name in _PROMPTS else None
    return msgspec.structs.replace(
        param,
        minimum=minimum if param.minimum is None else param.minimum,
        maximum=maximum if param.maximum is None else param.maximum,
        max_length=length if param.max_length is None else param.max_length,
    )


def shown(value: object) -> str:
    """``value`` as an error message shows it: at most some 60 characters."""
    text = repr(value[:64]) if isinstance(value, str) else repr(value) if not isinstance(value, dict | list) else "..."
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse(field: str, value: object, accepted: str) -> NoReturn:
    """Raise the error of a value that is not ``accepted``."""
    raise BadRequest(field, f"{field}={shown(value)}: must be {accepted}")


def unknown_fields(names: Iterable[str], known: Iterable[str], absent: Mapping[str, str] | None = None) -> BadRequest:
    """The error of ``names``, one or more fields that nothing reads, naming each with the nearest known one.

    ``absent`` says of some that are known elsewhere what it is that there is none of here.
    """
    there = sorted(known)
    unknown = list(names)
    hints = [_hint(name, there, absent or {}) for name in unknown[:_MOST_NAMED]]
    more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
    listed = f"known are {', '.join(there)}"
    if len(unknown) == 1:
        message = f"{shown(unknown[0])} is not a field of this request; {hints[0] or listed}"
    else:
        named = ", ".join(shown(name) + f" ({hint})" * bool(hint) for name, hint in zip(unknown, hints, strict=False))
        message = f"{named}{more} are not fields of this request" + f"; {listed}" * (not all(hints))
    return BadRequest(unknown[0][:60], message, code="unknown_field")


def _hint(name: str, known: list[str], absent: Mapping[str, str]) -> str:
    if name in absent:
        return absent[name]
    near = get_close_matches(name[:64], known, n=1) or [one for one in known if len(name) > 3 and name in one]
    return f"did you mean {near[0]!r}?" if near else ""


def check(param: Param, value: Any, *, form: bool, field: str | None = None) -> bool | int | float | str:
    """``value`` in the type of ``param``, or `BadRequest` that names ``field`` (the client's name for it).

    With ``form`` the value is text and is read as the parameter's type.
    """
    name = field or param.name
    match param.type:
        case "string":
            return _string(param, name, value)
        case "boolean":
            return _boolean(name, value, form=form)
        case "adapters":
            return _adapters(param, name, value)
        case "integer":
            return _ranged(param, name, read_integer(name, value, form=form))
        case "number":
            return _ranged(param, name, read_number(name, value, form=form))
        case "image" | "images" | "video":
            raise BadRequest(name, f"{name}: must be a picture")
        case _:
            assert_never(param.type)


def check_sides(field: str, value: object, params: Mapping[str, Param], sides: Mapping[str, int]) -> None:
    """Raise `BadRequest` unless ``sides``, read from ``value`` of ``field``, suit their parameters."""
    for name, side in sides.items():
        try:
            check(params[name], side, form=False)
        except BadRequest as error:
            raise BadRequest(field, f"{field}={value!r}: {error.message}") from error


def read_integer(field: str, value: Any, *, form: bool) -> int:
    """An integer within 64 bits; text only where ``form``."""
    if form and isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number, and 20.0 is an integer there
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(field, value, "an integer")
    if abs(value) > INT64_MAX:
        raise BadRequest(field, f"{field}: must be an integer of at most 64 bits")
    return value


def read_number(field: str, value: Any, *, form: bool) -> int | float:
    """A finite number; text only where ``form``."""
    if form and isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, value, "a number")
    if isinstance(value, int):
        return read_integer(field, value, form=False)
    if not math.isfinite(value):
        refuse(field, value, "a finite number")
    return value


def read_text(field: str, value: Any, limit: int) -> str:
    """A string of at most ``limit`` characters that UTF-8 can carry."""
    if not isinstance(value, str):
        refuse(field, value, "a string")
    if len(value) > limit:
        raise BadRequest(field, f"{field}: has {len(value)} characters; at most {limit} are accepted")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, f"{field}: has half of a surrogate pair at character {error.start}") from error
    return value


def _boolean(field: str, value: Any, *, form: bool) -> bool:
    if form and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        refuse(field, value, "true or false")
    return value


def _string(param: Param, field: str, value: Any) -> str:
    text = read_text(field, value, _PROMPT_CHARACTERS if param.max_length is None else param.max_length)
    if param.choices and text not in param.choices:
        refuse(field, text, f"one of {', '.join(param.choices)}")
    if param.required and not text.strip():
        raise BadRequest(field, f"{field}={shown(text)}: must not be empty")
    return text


def _adapters(param: Param, field: str, value: Any) -> str:
    text = read_text(field, value, ADAPTER_CHARACTERS)
    try:
        read_adapters(text, param.choices)
    except ValueError as error:
        raise BadRequest(field, f"{field}={shown(text)}: {error}") from error
    return text


def _ranged(param: Param, field: str, value: int | float) -> int | float:
    low, high = param.minimum, param.maximum
    if (low is not None and value < low) or (high is not None and value > high):
        refuse(field, value, span(low, high))
    if param.multiple_of is not None and (value - param.remainder) % param.multiple_of:
        refuse(field, value, _divisible(param, value))
    return value


def span(low: float | None, high: float | None) -> str:
    """The bounds in words."""
    match low, high:
        case None, None:
            return "any number"
        case None, _:
            return f"at most {_plain(high)}"
        case _, None:
            return f"at least {_plain(low)}"
        case _:
            return f"{_plain(low)} to {_plain(high)}"


def _plain(value: float | None) -> str:
    """A bound without the rounding of floats at the end of the 64-bit range."""
    assert value is not None
    return str(min(int(value), INT64_MAX)) if float(value).is_integer() else str(value)


def _divisible(param: Param, value: int | float) -> str:
    step, rest = param.multiple_of, param.remainder
    assert step is not None
    below = int(value - rest) // step * step + rest
    legal = [n for n in (below, below + step) if n >= (param.minimum or 0) and n <= (param.maximum or math.inf)]
    form = f"a multiple of {step}" if not rest else f"a multiple of {step} plus {rest}"
    return f"{form}; the nearest are {' and '.join(map(str, legal))}" if legal else form


def nearest(param: Param, value: float) -> int:
    """The legal value of an integer ``param`` closest to ``value``."""
    step, rest = param.multiple_of or 1, param.remainder
    low = 0 if param.minimum is None else int(param.minimum)
    high = INT64_MAX if param.maximum is None else int(param.maximum)
    found = math.floor((value - rest) / step + 0.5) * step + rest
    return min(max(found, low + (rest - low) % step), high - (high - rest) % step)
