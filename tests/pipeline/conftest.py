from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .harness import Trio

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name -> folder of its tiny checkpoint, built once."""
    from triptych.pipeline.load import quiet_libraries

    from .checkpoints import BUILDERS
    from .modular_image_checkpoints import IMAGE_BUILDERS
    from .modular_video_checkpoints import VIDEO_BUILDERS

    quiet_libraries()
    builders = BUILDERS | IMAGE_BUILDERS | VIDEO_BUILDERS
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp(family) / "model"
            builders[family](built[family])
        return built[family]

    return get


@pytest.fixture(scope="session")
def classic_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name -> folder of the tiny checkpoint of a classic pipeline, built once."""
    from triptych.pipeline.load import quiet_libraries

    from .classic_checkpoints import CLASSIC_BUILDERS

    quiet_libraries()
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp(family) / "model"
            CLASSIC_BUILDERS[family](built[family])
        return built[family]

    return get


@pytest.fixture(scope="session")
def trios(classic_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trio]:
    """Family name -> its three roles, each from a folder that has this role's weight files only."""
    from .classic_harness import REQUESTS
    from .harness import Trio

    loaded: dict[str, Trio] = {}

    def get(family: str) -> Trio:
        if family not in loaded:
            keeps = ("vae",) if "image" in REQUESTS[family] else ()
            work = tmp_path_factory.mktemp(f"{family}-roles")
            loaded[family] = Trio(classic_checkpoint(family), work, encoder_keeps=keeps)
        return loaded[family]

    return get
