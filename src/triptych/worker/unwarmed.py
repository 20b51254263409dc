"""What of a request was not warmed up: for the log, when a graph is compiled in the middle of serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.config import Shape
from triptych.wire.schema import RequestSchema


def unwarmed(params: Mapping[str, Any], schema: RequestSchema, declared: Sequence[Shape]) -> str:
    """How a request of these ``params`` differs from all ``declared`` shapes, as far as can be told."""
    shape = _shape_of(params, schema)
    name = "the model's own size" if shape is None else str(shape)
    if not declared:
        return f"{name} was not declared (--warmup)"
    listed = ", ".join(map(str, declared))
    if shape is None:
        return f"{name} may not be among what was declared (--warmup {listed})"
    if shape in declared:
        return f"{name} was declared, but not with {_rest(params, schema)}"
    alike = [other for other in declared if (other.width, other.height) == (shape.width, shape.height)]
    if shape.count > 1 and any(other.frames == shape.frames for other in alike):
        return f"n={shape.count} was not declared of that size (--warmup {listed}; say {name})"
    return f"{name} was not declared (--warmup {listed})"


def _shape_of(params: Mapping[str, Any], schema: RequestSchema) -> Shape | None:
    width, height = _value("width", params, schema), _value("height", params, schema)
    if not width or not height:
        return None
    frames, count = _value("num_frames", params, schema), _value("n", params, schema)
    return Shape(width=width, height=height, frames=frames or 1, count=count or 1)


def _rest(params: Mapping[str, Any], schema: RequestSchema) -> str:
    """What changes the size of a model's tensors besides the shape of an output."""
    rate = schema.param("fps")
    if rate is not None and params.get("fps", rate.default) != rate.default:
        return f"fps={params['fps']}"
    return "a prompt of that length, such guidance or such pictures"


def _value(name: str, params: Mapping[str, Any], schema: RequestSchema) -> Any:
    param = schema.param(name)
    default = None if param is None else param.default
    return default if params.get(name) is None else params[name]
