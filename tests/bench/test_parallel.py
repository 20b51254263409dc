"""The benchmark of several GPUs on CPU processes with the embedded model: what agrees, what is refused, what hangs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triptych.bench import parallel
from triptych.bench.parallel import layout, main, where
from triptych.bench.parallel_part import Line, Part
from triptych.errors import ConfigError
from triptych.parallelism import Parallelism

SMALL = ["tiny", "--shape", "64x64x5", "--steps", "2", "--device", "cpu"]


def test_each_layout_is_compared_with_one_process_which_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Symptom: each number of GPUs began with the same minute on one of them, while the others were held."""
    measured: list[tuple[int, int]] = []
    lines = parallel._lines

    def watched(part: Part, deadline: float) -> Iterator[Line]:
        measured.append((part.gpus, part.width))
        return lines(part, deadline)

    monkeypatch.setattr(parallel, "_lines", watched)
    base, file = tmp_path / "base", tmp_path / "rows.json"
    kept = [*SMALL, "--base", str(base), "--json", str(file), "--layouts"]
    assert main([*kept, "ulysses3", "--deadline", "0.2"]) == 1  # what fails is not kept
    assert main([*kept, "ulysses3"]) == 1
    first = json.loads(file.read_text())[:2]
    assert [row["layout"] for row in first] == ["alone", "alone"]
    assert main([*kept, "auto"]) == 0
    rows = json.loads(file.read_text())
    assert rows[:2] == first
    assert [(row["ranks"], row["layout"], row["guidance"]) for row in rows] == [
        (1, "alone", True),
        (1, "alone", False),
        (2, "auto", True),
        (2, "auto", False),
    ]
    assert rows[2]["equal"]
    assert all(row["error"] < 1e-5 for row in rows)
    assert " ms a step, guidance off, " in capsys.readouterr().out
    assert measured == [(1, 64), (1, 64), (2, 64)]
    assert main([*kept, "ulysses3", "--shape", "32x32x5"]) == 1  # another shape is another measurement
    assert measured[3:] == [(1, 32)]


def test_a_layout_that_is_not_done_by_its_deadline_is_a_row_that_says_so_and_a_refused_one_does_not_stop_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert main([*SMALL, "--layouts", "ulysses3,cfg", "--deadline", "0.2", "--json", str(file)]) == 1
    rows = json.loads(file.read_text())
    assert [(row["ranks"], row["layout"]) for row in rows] == [(1, "alone"), (2, "ulysses3"), (2, "cfg")]
    assert "num-gpus=2" in rows[1]["failed"]
    printed = capsys.readouterr().out
    assert "1 alone: failed: not done within 0 s" in printed
    assert "2 ulysses3: failed: num-gpus=2" in printed
    assert "2 cfg: failed: not done within 0 s" in printed


def test_a_row_of_a_hung_layout_says_where_its_main_thread_stands() -> None:
    said = (
        "some warning\nThread 0x1 [rank-1] (most recent call first):\n"
        '  File "/x/triptych/worker/ranks/leader.py", line 150 in _hear\n\n'
        "Thread 0x2 (most recent call first):\n"
        '  File "/x/torch/distributed/distributed_c10d.py", line 2 in broadcast\n'
        '  File "/x/triptych/accel/parallel/team.py", line 81 in broadcast\n'
        '  File "/x/triptych/bench/parallel_part.py", line 9 in main\n'
    )
    assert where(said) == ", stands in triptych/accel/parallel/team.py:81 (broadcast)"
    assert where("killed before it could say anything") == ""


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("auto", 8, Parallelism()),
        ("decode", 8, Parallelism(decoder_tp=8)),
        ("cfg", 4, Parallelism(cfg=2)),
        ("ulysses", 4, Parallelism(cfg=1, ulysses=4)),
        ("cfg2+ring", 8, Parallelism(cfg=2, ring=4)),
        ("cfg+tp4", 8, Parallelism(cfg=2, tp=4)),
        ("ulysses4+ring2", 8, Parallelism(cfg=1, ulysses=4, ring=2)),
    ],
)
def test_layouts_are_named_by_their_degrees(name: str, gpus: int, expected: Parallelism) -> None:
    assert layout(name, gpus) == expected


@pytest.mark.parametrize("name", ["all", "cfg2+cfg", "ulysses+ring"])
def test_a_layout_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="layouts="):
        layout(name, 2)


def test_a_name_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="layouts='all'"):
        main(["tiny", "--layouts", "all"])
    with pytest.raises(ConfigError, match="num-gpus='two'"):
        main(["tiny", "--num-gpus", "two"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_every_layout_of_two_gpus_is_measured_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["tiny", "--shape", "128x128x17", "--steps", "2", "--layouts", "auto,ulysses,ring,tp,decode"]
    assert main([*words, "--json", str(file), "--deadline", "120"]) == 0
    assert all(row["error"] < 0.1 for row in json.loads(file.read_text()))  # bfloat16
