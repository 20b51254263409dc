from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name -> folder of its tiny checkpoint, built once."""
    from triptych.pipeline.load import quiet_libraries

    from .checkpoints import BUILDERS

    quiet_libraries()
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp(family) / "model"
            BUILDERS[family](built[family])
        return built[family]

    return get
