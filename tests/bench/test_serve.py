"""The serving benchmark starts a group, loads it over HTTP, accounts for every request, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.nursery import forking
from triptych.bench.serve import main
from triptych.errors import ConfigError


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def forked() -> Iterator[None]:
    """Processes that import nothing anew."""
    with forking():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_bursts_and_arrivals_on_split_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    file = tmp_path / "rows.json"
    words = ["tiny", "--option", "device=cpu", "--option", "warmup=32x32x5", "--shape", "32x32x5", "--steps", "2"]
    words += ["--slo", "600,1000x,0.001x"]
    status = main([*words, "--bursts", "1,3", "--requests", "6", "--rate", "2", "--json", str(file)])
    rows = json.loads(file.read_text())
    assert [row["load"] for row in rows] == ["burst of 1", "burst of 3", "Poisson 2/s"]
    for row in rows:
        assert row["done"] == row["sent"]
        assert not row["failures"]
        assert 0 < row["p50"] <= row["p95"] <= row["p99"]
        assert [(limit["scale"], limit["share"]) for limit in row["attained"]] == [(None, 1), (1000, 1), (0.001, 0)]
        assert row["attained"][1]["seconds"] == pytest.approx(1e6 * row["attained"][2]["seconds"])
        assert set(row["loads"]) == {"encoder-0", "denoiser-0", "decoder-0"}
        assert {"encoder", "denoiser", "decoder", "file"} == set(row["stages"])
        assert set(row["handoffs"]) == {"encoder to denoiser", "denoiser to decoder"}
        for spent in row["handoffs"].values():
            assert 0 < spent["staging"] < row["p50"]
            assert 0 < spent["pulling"] < row["p50"]
    assert rows[0]["turnovers"] == 0
    assert 1 <= rows[1]["turnovers"] <= 2, "three through one denoiser"
    assert 0 < rows[1]["idle"] < rows[1]["p50"]
    assert status == (0 if all(row["little_holds"] for row in rows) else 1)
    printed = capsys.readouterr().out
    assert printed.count("warmed up for 32x32x5") == 3
    assert "memory of denoiser" in printed
    assert printed.count("600 s: 100.0%") == 3
    assert printed.count("handoffs, ms of staging + pull: encoder to denoiser") == 3
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--baseline", "ray"], "'ray' is none of replicas, stock"),
        (["--server", "http://127.0.0.1:1", "--baseline", "stock"], "starts nothing"),
        (["--shape", "big"], "must look like 832x480x81"),
        (["--option", "profile"], "NAME=VALUE"),
        (["--bursts", "one"], "whole numbers"),
        (["--slo", "2x,soon"], "--slo 'soon': must be seconds above 0, or a multiple"),
        (["--slo", "0"], "must be seconds above 0"),
        (["--slo=-1x"], "must be seconds above 0"),
        (["--slo", "nan"], "must be seconds above 0"),
        (["--no-split"], "leaves nothing to measure"),
        (["--denoiser-gpus", "a"], "GPU numbers"),
        (["--denoiser-gpus", "0,"], "GPU numbers"),
        (["tiny", "--baseline", "stock"], "needs --shape"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        main(words)
