"""Blocks of every family can be compiled as whole graphs, of which further sizes and texts need no further ones.

The compiler's front end is at work, and what it finds is run as it is: so the bytes must be those of the stock model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.accel import plan
from triptych.accel.tally import Tally
from triptych.config import ModelConfig, Shape
from triptych.ids import ROLES
from triptych.pipeline.load import load_pipeline, quiet_libraries

from .cases import BUILD, CASES
from .classic_harness import TOLERATED
from .harness import Trio

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

OFTEN = ("z_image", "sd3", "cogvideox_t2v")
"""Whose texts have any length; that names no repeated blocks in Diffusers; that is replayed."""
TEXTS = ("a cat", "zebras in the rain", "zebras " * 9, "zebras " * 20)


@pytest.fixture(autouse=True)
def front_end_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.compiler.reset()
    really = torch.compile

    def eagerly(plain: Any, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
        return really(plain, backend="eager", **more)

    monkeypatch.setattr(torch, "compile", eagerly)
    monkeypatch.setattr(plan, "_has_triton", lambda device: True)
    monkeypatch.setattr(plan, "_fusible", lambda device, dtype: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A family whose pipelines compile, and a request for it."""

    folder: Path
    asked: dict[str, Any]
    files: list[bytes]
    bounded: bool
    """Whether the model's positions end at twice the size that is asked for."""

    @staticmethod
    def of(family: str, folder: Path) -> Compiled:
        quiet_libraries()
        BUILD[family](folder)
        asked, files = CASES[family].asked()
        return Compiled(
            folder=folder, asked=asked | {"num_inference_steps": 2}, files=files, bounded=family == "cogvideox_i2v"
        )

    def trio(self, tally: Tally, **settings: Any) -> Trio:
        config = ModelConfig(path=str(self.folder), device="cpu", **settings)
        return Trio.of(dict.fromkeys(ROLES, load_pipeline(config, ROLES, "cpu", tally)))  # type: ignore[arg-type]

    def frames(self, trio: Trio, **more: Any) -> np.ndarray[Any, Any]:
        made = trio.generate(self.asked | more, self.files)[0].frames
        assert isinstance(made, np.ndarray)
        return made

    def sizes(self) -> list[dict[str, Any]]:
        """The request's own, and multiples of it."""
        height, width = self.asked["height"], self.asked["width"]
        last = () if self.bounded else ((3, 3), (3, 2))
        return [{"height": height * y, "width": width * x} for y, x in ((1, 1), (2, 1), (1, 2), (2, 2), *last)]


def check(family: str, folder: Path) -> None:
    """Whatever their sizes and texts, requests wait for the compiler a few times in all."""
    of, tally = Compiled.of(family, folder), Tally()
    stock, compiled = of.trio(Tally()), of.trio(tally, profile="lossless")
    seen: list[int] = []
    for number, size in enumerate(of.sizes()):
        made = of.frames(compiled, **size)
        seen.append(tally.compilations)
        if number < 2:  # each graph's first size
            assert np.array_equal(made, of.frames(stock, **size))
    assert seen[0] > 0
    assert seen[-2] == seen[-1], "every size would wait"
    for text in TEXTS if "prompt" in of.asked else ():
        of.frames(compiled, prompt=text)
        seen.append(tally.compilations)
    assert seen[-2] == seen[-1] or "prompt" not in of.asked, "every text would wait"
    assert tally.uncompiled == 0


def check_declared(family: str, folder: Path) -> None:
    """A request of a size that was declared does not wait at all."""
    of, tally = Compiled.of(family, folder), Tally()
    for name in {"max_sequence_length", "fps"} & of.asked.keys():
        del of.asked[name]  # a shape says nothing of them, so what is warmed up has the defaults
    shape = Shape(width=of.asked["width"], height=of.asked["height"], frames=of.asked.get("num_frames", 1))
    declared = of.trio(tally, profile="lossless", warmup=(shape,))
    known = tally.compilations
    assert known > 0
    for text in TEXTS if "prompt" in of.asked else (None,):
        of.frames(declared, **({} if text is None else {"prompt": text}))
    assert (tally.compilations, tally.uncompiled) == (known, 0)


@pytest.mark.parametrize("family", OFTEN)
def test_a_family_compiles_as_a_whole(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")


@pytest.mark.parametrize("family", OFTEN)
def test_of_a_declared_size_nothing_is_left_to_compile(family: str, tmp_path: Path) -> None:
    check_declared(family, tmp_path / "model")


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in CASES if name not in OFTEN])
def test_all_families_do(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model")


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in CASES if name not in OFTEN])
def test_of_their_declared_sizes_too(family: str, tmp_path: Path) -> None:
    check_declared(family, tmp_path / "model")
