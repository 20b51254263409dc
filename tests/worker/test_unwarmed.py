"""What the log says of a request that has something compiled."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.config import Shape
from triptych.wire.schema import Param, RequestSchema
from triptych.worker.unwarmed import unwarmed

SCHEMA = RequestSchema(
    model="m",
    pipeline="P",
    split="modular",
    task="text-to-video",
    output="video",
    params=(
        Param(name="width", type="integer", default=832),
        Param(name="height", type="integer", default=480),
        Param(name="num_frames", type="integer", default=81),
        Param(name="n", type="integer", default=1),
        Param(name="fps", type="integer", default=16),
    ),
)
DECLARED = (Shape(width=832, height=480, frames=81), Shape(width=1024, height=1024))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"num_frames": 49}, "832x480x49 was not declared (--warmup 832x480x81, 1024x1024)"),
        ({"n": 2}, "n=2 was not declared of that size (--warmup 832x480x81, 1024x1024; say 832x480x81*2)"),
        ({"width": 1024, "height": 1024, "num_frames": 1, "n": 3}, "say 1024x1024*3)"),
        ({"fps": 24}, "832x480x81 was declared, but not with fps=24"),
        ({"width": None}, "832x480x81 was declared, but not with a prompt of that length"),
    ],
)
def test_what_differs_from_the_declared_shapes_is_named(params: dict[str, Any], said: str) -> None:
    assert said in unwarmed(params, SCHEMA, DECLARED)


def test_without_a_declared_shape_that_is_said() -> None:
    assert unwarmed({}, SCHEMA, ()) == "832x480x81 was not declared (--warmup)"
