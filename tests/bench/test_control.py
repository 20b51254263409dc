"""The control-plane benchmark runs as a user runs it, and its rows mean what they say."""

from __future__ import annotations

import subprocess
import sys

import psutil

from triptych.bench.control import run_control_bench


def test_each_load_level_gives_a_row_and_no_process_stays_behind() -> None:
    before = {child.pid for child in psutil.Process().children()}
    rows = run_control_bench((1, 16), seconds=2, slots=8)
    assert [row.outstanding for row in rows] == [1, 16]
    for row in rows:
        assert row.requests >= row.outstanding
        assert 0 < row.p50_ms <= row.p99_ms
        assert 0 < row.server_cpu_us <= row.all_cpu_us
    # A closed loop: requests in flight are throughput times latency (Little's law), whatever the machine's speed.
    loaded = rows[1]
    assert loaded.p50_ms / 1e3 * loaded.requests_per_second <= 3 * loaded.outstanding
    assert {child.pid for child in psutil.Process().children()} <= before


def test_the_command_prints_a_table() -> None:
    code = "import sys; from triptych.bench.control import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--outstanding", "4", "--seconds", "0.3"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "every request ended DONE" in " ".join(result.stdout.split())  # however narrow the terminal


def test_a_no_op_instance_loads_no_torch() -> None:
    code = "import sys, triptych.bench.noop; print([m for m in ('torch', 'diffusers', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr
