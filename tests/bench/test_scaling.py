"""The list of all comparisons of several GPUs: what is in it, and how it is broken off and taken up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from triptych.bench.handoffs import Handoff
from triptych.bench.parallel import Row as ParallelRow
from triptych.bench.parallel import layout
from triptych.bench.scaling import Ledger, Plan, Run, carry_out, main, runs
from triptych.bench.serve import Row as ServeRow
from triptych.cli.main import build_parser
from triptych.errors import ConfigError

REFUSED = Run(name="refused", words=("up",), deadline=60.0)


def plan(gpus: int) -> Plan:
    return Plan(
        size="wan2.1-t2v-1.3b", model="m", gpus=gpus, device="cuda", shape="832x480x81", steps=(50, 4),
        profile="lossless", bursts="1,2,4,8", poisson=("--requests", "100", "--rate", "0.95"), base="b",
    )  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_run_is_a_command_that_is_understood(gpus: int) -> None:
    wanted = list(runs(plan(gpus)))
    assert len({run.name for run in wanted}) == len(wanted)
    parser = build_parser()
    for run in wanted:
        parser.parse_args(run.words)
        if run.name.startswith(("step-", "spread-")):
            count = int(run.name.partition("-")[2])
            for name in run.words[run.words.index("--layouts") + 1].split(","):
                layout(name, count)


def test_one_gpu_is_measured_once_for_all_numbers_of_gpus() -> None:
    words = {run.name: run.words for run in runs(plan(8)) if run.name.startswith("step-")}
    assert set(words) == {"step-2", "step-4", "step-8"}
    assert {said[said.index("--base") + 1] for said in words.values()} == {"b"}


def test_eight_gpus_are_three_pairs_or_one_of_four_beside_encoder_and_decoder_against_replicas() -> None:
    serving = {run.name: " ".join(run.words) for run in runs(plan(8)) if run.name.startswith("serve-50-")}
    assert "--denoiser-gpus 1,2;3,4;5,6 --decoder-gpus 7" in serving["serve-50-three-pairs"]
    assert "--encoder-decoder-gpus 0 --denoiser-gpus 1,2,3,4" in serving["serve-50-one-of-four"]
    assert all(words.endswith("--bursts 1,2,4,8 --requests 100 --rate 0.95") for words in serving.values())
    assert "--denoiser-gpus 0;1;2;3;4;5;6;7 --no-split --baseline replicas" in serving["serve-50-replicas"]


def test_a_run_that_fails_or_is_late_is_written_down_and_one_that_was_cut_short_is_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert carry_out(REFUSED, ledger)
    assert carry_out(Run(name="late", words=REFUSED.words, deadline=0.05), ledger)
    assert not carry_out(Run(name="cut", words=REFUSED.words, deadline=60.0), ledger, left=0.05)
    again = Ledger(tmp_path)
    assert {name: entry["status"] for name, entry in again.ended.items()} == {"refused": 2, "late": None}


def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"name": "serve-4-one", "status": 0}
    (tmp_path / "runs.jsonl").write_text(json.dumps(entry) + "\n")
    words = ["tiny", "--out", str(tmp_path), "--num-gpus", "1", "--device", "cpu", "--only", "serve-4-one"]
    assert main(words) == 0
    assert "serve-4-one: done before" in capsys.readouterr().out
    gone = {"name": "checkpoint", "status": 0}
    (tmp_path / "runs.jsonl").write_text(json.dumps(gone) + "\n")
    sized = ["wan2.1-t2v-1.3b", *words[1:-1], "checkpoint", "--budget", "1"]
    assert main(sized) == 1  # the checkpoint was written on a machine that is gone
    assert "1 are left to do" in capsys.readouterr().out
    (tmp_path / "runs.jsonl").write_text(json.dumps(entry) + "\n")
    assert main([*words[:-1], "serve", "--budget", "1"]) == 1
    assert "3 are left to do" in capsys.readouterr().out


def test_the_report_has_every_row_that_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ParallelRow(ranks=2, layout="cfg", guidance=True, seconds=0.4, ratio=1.9, equal=True)
    refused = ParallelRow(ranks=2, layout="ring", guidance=None, failed="num-gpus=2: no")
    served = ServeRow(
        arrangement="split", gpus=2, load="burst of 2", sent=2, done=2, qps=0.5, p50=1, p95=2, p99=2, live=1,
        expected_live=1, little_holds=True, failures=(), stages={}, turnovers=1, idle=0.0004,
        handoffs={"encoder to denoiser": Handoff(staging=0.001, pulling=0.0025)}, loads={"denoiser-0": 12.25},
    )  # fmt: skip
    (tmp_path / "step-2.json").write_text(json.dumps([asdict(shared), asdict(refused)]))
    (tmp_path / "serve-50-pair.json").write_text(json.dumps([asdict(served)]))
    assert main(["tiny", "--out", str(tmp_path), "--report"]) == 0
    printed = capsys.readouterr().out
    assert "| 2 | cfg | on | 400.0 | 1.90 | 95% | equal |" in printed
    assert "| 2 | ring |  | failed: num-gpus=2: no |" in printed
    assert (
        "| 50-pair (split) | 2 | burst of 2 | 2/2 | 0.5 | 1.00 | 2.00 | 2.00 | encoder to denoiser 1.00 + 2.50 | 0.40 |"
        in printed
    )
    assert "| 50-pair | denoiser-0 | 12.2 |" in printed


def test_a_machine_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num-gpus=3"):
        main(["tiny", "--out", str(tmp_path), "--num-gpus", "3"])
