"""Every way in which the table of models says that GPUs can share a class's work, on two ranks of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pipeline.cases import BUILD, CASES
from tests.pipeline.classic_harness import TOLERATED
from tests.worker.ranks.pair import Ranks
from triptych.parallelism import Parallelism
from triptych.pipeline.load import quiet_libraries

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family to the folder of its tiny checkpoint, built once."""
    quiet_libraries()
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family) / "model"
            BUILD[family](folders[family])
        return folders[family]

    return get


def check_branches(folder: Path, family: str) -> None:
    ranks = Ranks(Parallelism(cfg=2), path=str(folder))
    try:
        for alone, shared in ranks.compared(*CASES[family].asked()):
            assert torch.equal(alone, shared)
    finally:
        ranks.close()


@pytest.mark.parametrize("family", ["ltx2"])
def test_a_family_on_two_ranks_makes_what_it_makes_on_one(family: str, built: Callable[[str], Path]) -> None:
    check_branches(built(family), family)
