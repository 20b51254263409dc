"""The transfer benchmark measures what it says, between real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from triptych.bench.transfer import run_transfer_bench
from triptych.errors import ConfigError


def test_every_way_is_measured_at_every_size() -> None:
    rows = run_transfer_bench([64 << 10, 1 << 20], ["local", "shm"], rounds=5)
    assert [(row.nbytes, row.way) for row in rows] == [
        (nbytes, way) for nbytes in (64 << 10, 1 << 20) for way in ("memory copy", "raw TCP", "local", "shm")
    ]
    assert all(0 < row.median <= row.p99 for row in rows)
    assert all(row.gigabytes_per_second == row.nbytes / row.median / 1e9 for row in rows)


def test_whole_handoffs_between_devices_are_measured_in_parts() -> None:
    rows = run_transfer_bench([64 << 10], ["local", "shm"], rounds=5, device="cpu")
    assert [row.way for row in rows] == ["two copies", "local", "shm"]
    assert [len(row.parts) for row in rows] == [0, 3, 3]
    assert all(max(row.parts) <= row.p99 for row in rows[1:])


def test_the_command_prints_a_table_with_mooncake() -> None:
    command = "import sys; from triptych.bench.transfer import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--sizes", "65536", "--rounds", "3", "--planes", "mooncake"]
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True, timeout=300
    )
    assert "64 KiB" in done.stdout
    assert "mooncake" in done.stdout


@pytest.mark.parametrize(("sizes", "rounds"), [([0], 5), ([], 5), ([1024], 0)])
def test_nothing_to_measure_is_refused(sizes: list[int], rounds: int) -> None:
    with pytest.raises(ConfigError, match="must be greater than 0"):
        run_transfer_bench(sizes, ["local"], rounds=rounds)
