"""Whatever number the schema accepts, a pipeline can compute: each family asked at the ends of each of its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from triptych.config import ModelConfig, Task
from triptych.errors import BadRequest
from triptych.ids import ROLES
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.request import complete
from triptych.wire.schema import Param, RequestSchema

from .cases import BUILD, CASES
from .classic_harness import TOLERATED
from .harness import Trio
from .parity import picture, png

DEAR = ("height", "width", "num_frames", "num_inference_steps")
"""What costs grow with: tried at the two least values."""
ELSEWHERE = ("seed", "fps", "n")
"""No block of a pipeline computes with the first two; of several outputs other tests say more."""
HEAVY = {"helios", "glm_image"}
"""Seconds a request even here: their bounds are those of the others."""
TINY = {"ltx2": ("height", "width")}
"""Sides that only the toy's autoencoder, which compresses less than any real one, can be asked for."""

ALIKE = {
    "wan22_t2v", "wan22_i2v", "wan_distilled", "wan22_distilled", "qwen_distilled", "sd3_without_t5", "flux2_klein",
    "flux2_klein_base",
}  # fmt: skip
"""Those of other checkpoints of a family that is there too."""

RUNS: list[Any] = [
    *(pytest.param(family, None, marks=[pytest.mark.families] if family in ALIKE else []) for family in CASES
      if family not in HEAVY),
    *((family, task) for task in ("image-to-image", "inpainting")
      for family in ("stable_diffusion", "sdxl", "flux", "z_image", "qwen_t2i")),
]  # fmt: skip

pytestmark = TOLERATED


@dataclass
class Loaded:
    trio: Trio
    schema: RequestSchema
    request: dict[str, Any]
    files: list[bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def built(family: str) -> Path:
        path = tmp_path_factory.mktemp(family) / "model"
        BUILD[family](path)
        return path

    return built


def load(path: Path, family: str, task: Task | None) -> Loaded:
    pipeline = load_pipeline(ModelConfig(path=str(path), device="cpu", task=task), ROLES, "cpu")
    schema = pipeline.schema
    request, files = CASES[family].asked()
    if task is not None:
        size = {side: request[side] for side in ("height", "width")}
        files = [png(picture(size, 1)), png(picture(size, 2))]
        request |= {"image": {"blob": 0}, "mask_image": {"blob": 1}, "num_inference_steps": 4}
    request = {name: value for name, value in request.items() if schema.param(name) is not None}
    return Loaded(Trio.of(dict.fromkeys(ROLES, pipeline)), schema, request, files)


def ends(param: Param) -> Iterator[int | float]:
    """The values of ``param`` that are tried."""
    kind = int if param.type == "integer" else float
    assert param.minimum is not None
    yield kind(param.minimum)
    if param.name in DEAR:
        yield kind(param.minimum + (param.multiple_of or 1))
    elif param.maximum is not None:
        yield kind(param.maximum)


def refused(schema: RequestSchema, request: dict[str, Any]) -> bool:
    """Whether the values, each legal alone, are refused together."""
    try:
        complete(schema, request)
    except BadRequest:
        return True
    return False


@pytest.mark.parametrize(("family", "task"), RUNS)
def test_what_the_schema_accepts_can_be_computed(folder: Any, family: str, task: Task | None) -> None:
    """Symptom: requests at a bound failed in the middle of a stage, and that was held against the instance."""
    at = load(folder(family), family, task)
    assert not refused(at.schema, at.request)
    wrong: list[str] = []
    for param in at.schema.params:
        if param.type not in ("integer", "number") or param.name in (*ELSEWHERE, *TINY.get(family, ())):
            continue
        for value in dict.fromkeys(ends(param)):
            request = at.request | {param.name: value}
            if refused(at.schema, request):
                continue
            try:
                at.trio.generate(request, at.files)
            except Exception as error:
                wrong.append(f"{param.name}={value}: {type(error).__name__}: {error}")
    assert not wrong
