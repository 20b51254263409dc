"""The cases of families see: another prompt, and another scale of guidance, make another result.

One that does not compares nothing of what a test compares by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych.config import ModelConfig
from triptych.ids import ROLES
from triptych.pipeline.load import load_pipeline, quiet_libraries

from .cases import BUILD, CASES
from .classic_harness import TOLERATED
from .harness import Trio

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

OFTEN = ("qwen_t2i",)
"""Its template is long, and was all that its text encoder saw."""


def check(family: str, folder: Path) -> None:
    quiet_libraries()
    BUILD[family](folder)
    pipeline = load_pipeline(ModelConfig(path=str(folder), device="cpu"), ROLES, "cpu")
    trio: Any = Trio.of(dict.fromkeys(ROLES, pipeline))  # pyright: ignore[reportArgumentType]
    asked, files = CASES[family].asked()
    asked |= {"num_inference_steps": 2}
    scale = pipeline.schema.param("guidance_scale")

    def made(changes: Mapping[str, Any]) -> Any:
        return trio.generate(asked | changes, files)[0].frames

    once = made({})
    if pipeline.schema.param("prompt") is not None:
        assert not np.array_equal(made({"prompt": "zebras in the rain"}), once)
    if scale is not None:
        assert not np.array_equal(made({"guidance_scale": 9.0}), once)


@pytest.mark.parametrize("family", OFTEN)
def test_a_case_sees_prompt_and_guidance(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in CASES if name not in OFTEN])
def test_all_cases_do(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")
