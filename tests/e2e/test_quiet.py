"""What a role process writes down while it computes: its own lines, and no library's bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Spawn
from tests.e2e.harness import Api, until
from tests.pipeline.modular_video_checkpoints import helios
from triptych.launch.ports import free_ports


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # Helios' scheduler, where it is built
def test_a_loop_over_chunks_draws_no_bars_into_the_log(spawn: Spawn, folder: Path) -> None:
    """Symptom elsewhere: a line a step for every chunk of every request, of requests that interleave in one line."""
    helios(folder / "model")
    (port,), scheduler = free_ports(1), free_ports(4)[0]
    words = ["--device", "cpu", "--port", str(port), "--scheduler-port", str(scheduler)]
    process = spawn("monolithic", "serve", str(folder / "model"), *words)
    api = Api(f"http://127.0.0.1:{port}")
    until(lambda: api.ready() or process.status is not None, "the server being ready")
    assert process.status is None, process.output()
    made = api.make(size="64x32", num_frames=66, num_inference_steps=2, max_sequence_length=32)
    assert made[4:8] == b"ftyp"
    api.close()
    assert process.stop() == 0
    assert "finished role=decoder" in process.output()
    assert "it/s" not in process.output()
    assert "%|" not in process.output()
