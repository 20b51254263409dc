"""Every way in which the table of models says that GPUs can share a class's work, on two ranks of the CPU.

A handful of families is part of every run of the tests; ``make families`` goes through all that the table names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.cases import BUILD, CASES
from tests.pipeline.classic_harness import TOLERATED
from tests.worker.ranks.pair import Ranks
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.capabilities import capability_of
from triptych.pipeline.load import quiet_libraries
from triptych.pipeline.ways import Way

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

WAYS: dict[Way, tuple[Parallelism, Role, str]] = {
    "cfg": (Parallelism(cfg=2), Role.DENOISER, ""),
    "ulysses": (Parallelism(cfg=1, ulysses=2), Role.DENOISER, "tokens shared by ulysses 2"),
    "ring": (Parallelism(cfg=1, ring=2), Role.DENOISER, "ring 2"),
    "tp": (Parallelism(cfg=1, tp=2), Role.DENOISER, "weights spread over 2"),
    "encoder-tp": (Parallelism(encoder_tp=2), Role.ENCODER, "text encoders spread over 2"),
    "decoder-tp": (Parallelism(decoder_tp=2), Role.DECODER, "decoded in 2 strips"),
}
"""How each is asked for, which role shares it, and what the fingerprint says of it."""

OFTEN: tuple[tuple[str, Way], ...] = (
    ("ltx2", "cfg"),
    ("hunyuan_video15", "cfg"),
    ("ltx", "ulysses"),
    ("qwen_t2i", "ring"),
    ("wan22_t2v", "tp"),
    ("qwen_t2i", "decoder-tp"),
)
"""Two guiders; a guider that the model's index names; masks; masks that hide nothing; two transformers; images."""

UNSHARED = {"wan22_ti2v": ("decoder-tp",)}
"""What the table says of a class and what this model of it lacks: its VAE is Wan 2.2's."""


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


def check(folder: Path, family: str, way: Way, caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks make what one process makes: with branches the same bytes, otherwise up to rounding."""
    caplog.clear()
    parallel, role, technique = WAYS[way]
    ranks = Ranks(parallel, path=str(folder), roles=(role,))
    try:
        assert technique in ranks.shared.fingerprint
        made = ranks.compared(role, *CASES[family].asked())
        assert made
        assert "each rank computes the whole forward" not in caplog.text
        for alone, shared in made:
            assert alone.shape == shared.shape
            if way == "cfg" or not (alone.is_floating_point() or alone.dtype == torch.uint8):
                assert torch.equal(alone, shared)
            elif alone.dtype == torch.uint8:
                assert (alone.int() - shared.int()).abs().max() <= 1
            else:
                assert (alone - shared).norm() <= 1e-4 * alone.norm()
    finally:
        ranks.close()


@pytest.mark.parametrize(("family", "way"), OFTEN)
def test_a_family_on_two_ranks_makes_what_it_makes_on_one(
    family: str, way: Way, built: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    check(built(family), family, way, caplog)


@pytest.mark.families
@pytest.mark.parametrize("family", CASES)
def test_all_families_do_in_all_ways_of_the_table(
    family: str, built: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = built(family)
    found = capability_of(json.loads((folder / "model_index.json").read_text())["_class_name"])
    failed: dict[str, Any] = {}
    for way in found.ways:
        if (family, way) in OFTEN:
            continue
        try:
            check(folder, family, way, caplog)
        except Exception as error:
            failed[way] = error
    lacks = UNSHARED.get(family, ())
    assert failed.keys() == set(lacks), failed
    assert all(isinstance(error, ConfigError) for error in failed.values())
