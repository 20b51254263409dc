"""The benchmark of several GPUs on two CPU processes with the embedded model: every layout agrees with one process."""

from __future__ import annotations

import re

import pytest

from triptych.bench.parallel import main
from triptych.errors import ConfigError


def test_each_layout_is_compared_with_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny", "--shape", "64x64x5", "--steps", "2", "--device", "cpu", "--layouts", "auto"]
    assert main(words) == 0
    table = capsys.readouterr().out
    rows = [re.split(r"\s*[│┃|]\s*", line.strip())[1:-1] for line in table.splitlines() if "│" in line]
    assert [row[:3] for row in rows] == [
        ["1", "alone", "on"],
        ["1", "alone", "off"],
        ["2", "auto", "on"],
        ["2", "auto", "off"],
    ]
    assert rows[2][5] == "yes"
    assert all(float(row[6]) < 1e-5 for row in rows)


def test_a_layout_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="layouts='all': must be among"):
        main(["tiny", "--layouts", "all"])
