"""Who can reach the control plane and means harm: with keys he does none, and without he stops no accepted job."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Spawn
from tests.e2e.fuzz import ping_and_reset
from tests.e2e.harness import Api, Process, until
from triptych.launch.ports import free_ports

STRIKES = 20
"""Without keys the first or second ends its process, as libzmq is now."""
ABORT = "killed by SIGABRT"


def strike(port: int, peer: bytes) -> bool:
    """Whether a hand was shaken there. The port may be closed already: its process has ended."""
    try:
        return ping_and_reset(port, peer)
    except OSError:
        return False


class Up:
    """`triptych up` with one replica in the middle of a job."""

    def __init__(self, spawn: Spawn, *words: str) -> None:
        port, self.scheduler, *_ = free_ports(5)
        self.process: Process = spawn("up", "up", "tiny", "--device", "cpu", "--replicas", "1", "--port", str(port),
                                      "--scheduler-port", str(self.scheduler), *words, forked=True)  # fmt: skip
        self.api = Api(f"http://127.0.0.1:{port}")
        until(lambda: "ready on http://" in self.process.output() or self.process.status is not None, "up being ready")
        assert self.process.status is None, self.process.output()
        (instance,) = self.api.info()["instances"]
        self.work = int(instance["work_url"].rpartition(":")[2])
        self.job = self.api.submit(size="128x128", num_frames=9, num_inference_steps=60)
        until(lambda: (self.api.job(self.job)["step"] or 0) >= 2, "the second step")

    def close(self) -> None:
        """The job ends well, and so does everything."""
        until(self.api.ready, "being ready again")
        self.api.done(self.job)
        assert self.api.content(self.job)
        self.api.close()
        assert self.process.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("target", ["server", "instance"])
def test_without_keys_a_ping_costs_a_restart_at_most(spawn: Spawn, target: str) -> None:
    up = Up(spawn)
    port, peer = (up.scheduler, b"DEALER") if target == "server" else (up.work, b"PUSH")
    shaken = 0
    for _ in range(STRIKES):
        shaken += strike(port, peer)
        time.sleep(0.1)
        if ABORT in up.process.output():
            break
    assert shaken
    up.close()


def test_with_keys_a_ping_of_a_stranger_ends_no_process(spawn: Spawn, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "triptych.cli.main", "keygen", str(folder / "keys")], check=True)
    up = Up(spawn, "--disagg-key-dir", str(folder / "keys"))
    for _ in range(STRIKES):
        assert not strike(up.scheduler, b"DEALER")
        for port in (*range(up.scheduler + 1, up.scheduler + 4), up.work):
            assert not strike(port, b"PUSH")
    up.close()
    assert ABORT not in up.process.output()
    assert "instance_lost" not in up.process.output()
