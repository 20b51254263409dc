"""Profile ``auto``: what the machine and the other options allow, said in the log, and never in the way of a start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from triptych.accel.parallel.team import Team
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.parallelism import Parallelism
from triptych.pipeline import load
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.loading import Loading
from triptych.pipeline.weights import load_component

from .test_hooking_guiders import folder  # noqa: F401, a fixture

HOME = "XDG_CACHE_HOME"


def loading(team: Team | None = None, **options: Any) -> Loading:
    model = ModelConfig(**{"path": "tiny", "profile": "auto", **options})
    return Loading(model=model, roles=ROLES, device="cpu", tally=Tally(), team=team, component=load_component)


@pytest.mark.parametrize(
    ("options", "profile", "why"),
    [
        ({}, "lossless", "bfloat16 on CUDA"),
        ({"device": "cpu"}, "stock", "float32 on cpu"),
        ({"dtype": "float16"}, "stock", "float16 on cuda"),
        ({"offload": {Role.DENOISER: "block"}}, "stock", "offload moves the weights"),
    ],
)
def test_it_is_what_machine_and_options_allow(
    options: dict[str, Any], profile: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "triptych"):
        assert loading(**options).settled().model.profile == profile
    assert caplog.messages == [f"profile={profile} (auto): {why}"]


def test_weights_that_are_spread_are_stock_ones(caplog: pytest.LogCaptureFixture) -> None:
    team: Any = type("Team", (), {"wish": Parallelism(tp=2)})()
    assert loading(team).settled().model.profile == "stock"


def test_what_is_asked_for_by_name_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triptych"):
        asked = loading(profile="lossless", device="cpu").settled()
        assert asked.without_kernels("a reason").model.profile == "lossless"
    assert not caplog.messages


def test_a_start_goes_on_without_a_folder_for_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers often have a home that cannot be written."""
    (tmp_path / "triptych").write_text("a file where the folder should be")
    monkeypatch.setenv(HOME, str(tmp_path))
    on_gpu: dict[str, Any] = {"path": "tiny", "device": "cuda"}
    with caplog.at_level(logging.WARNING, "triptych"):
        load_pipeline(ModelConfig(**on_gpu, profile="auto"), (Role.DECODER,), "cpu")
    assert [m for m in caplog.messages if m.startswith("profile=stock (auto), which is slower: cache-dir=")]
    for asked in ({"profile": "lossless"}, {"profile": "auto", "cache_dir": tmp_path / "triptych"}):
        with pytest.raises(ConfigError, match=r"cache-dir=.*: cannot be used"):
            load_pipeline(ModelConfig(**on_gpu, **asked), (Role.DECODER,), "cpu")


def test_a_guider_that_changes_the_model_has_stock_forwards(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setattr(load, "count_compilations", lambda tally: None)
    config = ModelConfig(path=str(folder), device="cuda", profile="auto")
    with caplog.at_level(logging.WARNING, "triptych"):
        load_pipeline(config, (Role.DECODER,), "cpu")
    assert "profile=stock (auto), which is slower: SkipLayerGuidance changes the model for some of its branches" in (
        caplog.messages
    )


def test_on_a_cpu_its_work_goes_on_under_profile_stock() -> None:
    prints = {
        profile: load_pipeline(ModelConfig(path="tiny", device="cpu", profile=profile), (Role.DENOISER,), "cpu")
        for profile in ("auto", "stock")
    }
    assert prints["auto"].fingerprint == prints["stock"].fingerprint
