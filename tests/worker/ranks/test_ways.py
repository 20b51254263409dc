"""Every way in which the table of models says that GPUs can share a class's work, on two ranks of the CPU.

A handful of families is part of every run of the tests; ``make families`` goes through all that the table names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pipeline.cases import BUILD, CASES
from tests.pipeline.classic_harness import TOLERATED
from tests.worker.ranks.pair import Ranks
from triptych.accel.parallel.team import Team
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.capabilities import model_capability
from triptych.pipeline.load import load_cold, quiet_libraries
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
        exact = way == "cfg" and CASES[family].request.get("guidance_scale") != 1.0
        assert "each rank computes such forwards whole" not in caplog.text
        for alone, shared in made:
            assert alone.shape == shared.shape
            if exact or not (alone.is_floating_point() or alone.dtype == torch.uint8):
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
    ways = model_capability(str(folder)).ways
    failed: dict[Way, str] = {}
    for way in ways:
        if (family, way) in OFTEN:
            continue
        try:
            check(folder, family, way, caplog)
        except ConfigError as error:
            if "must divide" not in error.message:
                failed[way] = repr(error)
        except Exception as error:
            failed[way] = repr(error)
    assert not failed
    # What it says nothing of is refused at start.
    for way in WAYS.keys() - {*ways}:
        parallel, role, _ = WAYS[way]
        team = Team(rank=0, size=2, device=torch.device("cpu"), wish=parallel, meet=lambda _: None)
        with pytest.raises(ConfigError):
            load_cold(ModelConfig(path=str(folder), device="cpu"), (role,), "cpu", team=team)
