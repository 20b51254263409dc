"""Rules between parameters that are each legal alone."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.wire.schema import Beside, Param, RequestSchema

SCHEMA = RequestSchema(
    model="filmer",
    pipeline="FilmPipeline",
    split="modular",
    task="image-to-video",
    output="video",
    params=(
        Param(name="height", type="integer", minimum=16, maximum=64),
        Param(name="width", type="integer", minimum=16, maximum=64),
        Param(name="num_frames", type="integer", minimum=1, beside=(Beside(param="last_image", minimum=5),)),
        Param(name="num_inference_steps", type="integer", minimum=1),
        Param(name="strength", type="number", nullable=True, minimum=0.0, maximum=1.0),
        Param(name="last_image", type="image", nullable=True),
        Param(name="mask", type="video", nullable=True, needs="video"),
        Param(name="video", type="video", nullable=True),
    ),
    max_pixels=64 * 64 * 9,
)
GIVEN: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}
BLOB = {"blob": 0}


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"height": 64, "width": 64, "num_frames": 13}, "size", "size: 64x64 in 13 frames is 53248 pixels; at most 9"),
        ({"mask": BLOB}, "mask", "mask: is of no use without video"),
        ({"num_frames": 1, "last_image": BLOB}, "num_frames", "num_frames=1: must be at least 5 beside last_image"),
        ({"strength": 0.0}, "strength", "strength=0.0: must be at least 0.25 at 4 steps, so that one step is computed"),
        ({"strength": 0.2}, "strength", "strength=0.2: must be at least 0.25 at 4 steps"),
        ({"strength": 0.9999, "num_inference_steps": 1}, "strength", "strength=0.9999: must be at least 1 at 1 steps"),
    ],
)
def test_what_cannot_be_together_is_named_with_what_can(values: dict[str, Any], field: str, message: str) -> None:
    objection = SCHEMA.objection(GIVEN | values)
    assert objection is not None
    assert objection.field == field
    assert objection.message.startswith(message)


def test_the_strength_that_an_objection_names_is_taken() -> None:
    """Symptom: at 3 steps it named 0.333333, which was then refused with the same words."""
    for steps in range(1, 10_001):
        given = GIVEN | {"num_inference_steps": steps}
        objection = SCHEMA.objection(given | {"strength": 1e-9})
        assert objection is not None
        named = float(objection.message.partition("at least ")[2].split()[0])
        assert named <= 1.001 / steps + 1e-4, "it is near the least"
        assert SCHEMA.objection(given | {"strength": named}) is None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_frames": 1},
        {"num_frames": 1, "last_image": None},
        {"last_image": BLOB},
        {"strength": 0.25},
        {"strength": None},
        {"mask": BLOB, "video": BLOB},
    ],
)
def test_what_can_be_together_is_accepted(values: dict[str, Any]) -> None:
    assert SCHEMA.objection(GIVEN | values) is None
