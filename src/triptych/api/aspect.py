"""Sizes by shape: the height and width that have the area of the model's own size, in another shape."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triptych.api.pictures import Size
from triptych.api.validation import nearest
from triptych.errors import BadRequest
from triptych.wire.schema import Param

ADAPTIVE = "resize_mode"
"""The field by which a task says that its picture gives the shape."""


def has_own_size(params: Mapping[str, Param]) -> bool:
    """Whether the model makes a size of its own where none is asked for. Others go by the picture anyway."""
    return all(name in params and isinstance(params[name].default, int) for name in ("height", "width"))


def sides_of(params: Mapping[str, Param], wide: float) -> dict[str, int]:
    """Height and width of the area of the model's own size, the one ``wide`` times the other, each the nearest legal
    value."""
    return {name: nearest(params[name], side) for name, side in _wished(params, wide).items()}


def sides_of_picture(params: Mapping[str, Param], picture: Size) -> dict[str, int]:
    """Height and width in the shape of a picture of that size; smaller where a side would be too long otherwise.

    Raises `BadRequest` where bounds of the model would bend that shape.
    """
    width, height = picture
    wished = _wished(params, width / height)
    scale = min(1.0, *((params[name].maximum or side) / side for name, side in wished.items()))
    sides = {name: side * scale for name, side in wished.items()}
    if any(side < (params[name].minimum or 0) for name, side in sides.items()):
        raise BadRequest(
            ADAPTIVE,
            f"{ADAPTIVE}='adaptive': the picture is {width}x{height}, and the model makes no size of that shape; "
            "give target_shape",
        )
    return {name: nearest(params[name], side) for name, side in sides.items()}


def _wished(params: Mapping[str, Param], wide: float) -> dict[str, float]:
    height, width = params["height"].default, params["width"].default
    assert isinstance(height, int)
    assert isinstance(width, int)
    tall = math.sqrt(height * width / wide)
    return {"height": tall, "width": tall * wide}
