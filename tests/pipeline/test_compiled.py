"""Blocks of every family can be compiled as whole graphs, and texts of further lengths bring no further graphs.

The compiler's front end is at work, and what it finds is run as it is: so the bytes must be those of the stock model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from triptych.accel import plan
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.ids import ROLES
from triptych.pipeline.load import load_pipeline, quiet_libraries

from .cases import BUILD, CASES
from .classic_harness import TOLERATED
from .harness import Trio

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

OFTEN = ("z_image", "sd3", "cogvideox_t2v")
"""Whose texts have any length; that names no repeated blocks in Diffusers; that is replayed."""
TEXTS = ("a cat", "zebras in the rain", "zebras " * 9, "zebras " * 20, "zebras " * 31)


@pytest.fixture(autouse=True)
def front_end_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.compiler.reset()
    really = nn.Module.compile

    def eagerly(block: nn.Module, *, options: dict[str, Any], **more: Any) -> None:
        really(block, backend="eager", **more)

    monkeypatch.setattr(nn.Module, "compile", eagerly)
    monkeypatch.setattr(plan, "_has_triton", lambda device: True)
    monkeypatch.setattr(plan, "_fusible", lambda device, dtype: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def check(family: str, folder: Path) -> None:
    quiet_libraries()
    BUILD[family](folder)
    tally = Tally()
    stock, compiled = (
        Trio.of(dict.fromkeys(ROLES, load_pipeline(config, ROLES, "cpu", tally)))  # type: ignore[arg-type]
        for config in (ModelConfig(path=str(folder), device="cpu", profile=p) for p in ("stock", "lossless"))
    )
    asked, files = CASES[family].asked()
    asked |= {"num_inference_steps": 2}
    wanted, made = (trio.generate(asked, files)[0].frames for trio in (stock, compiled))
    assert np.array_equal(made, wanted)
    assert tally.compilations > 0
    seen: list[int] = []
    for text in TEXTS if "prompt" in asked else ():
        compiled.generate(asked | {"prompt": text}, files)
        seen.append(tally.compilations)
    assert seen[-2:-1] == seen[-1:], "every text would wait for the compiler"
    assert tally.uncompiled == 0


@pytest.mark.parametrize("family", OFTEN)
def test_a_family_compiles_as_a_whole(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in CASES if name not in OFTEN])
def test_all_families_do(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")
