"""Cut, delay and loss between role processes, in network namespaces where the machine permits them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import environment

NAMESPACES = ["unshare", "--user", "--map-root-user", "--net"]


def _why_not() -> str | None:
    """Why this machine cannot run the test."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    words = [*NAMESPACES, "ip", "tuntap", "add", "dev", "probe", "mode", "tun"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no network namespaces with TUN devices: {tried.stderr.strip()}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bad_link_to_the_denoiser_costs_time_and_no_request(tmp_path: Path) -> None:
    if reason := _why_not():
        pytest.skip(reason)
    done = subprocess.run(
        [*NAMESPACES, sys.executable, "-m", "tests.e2e.network_faults", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
        env=environment() | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert "cut for 5 s in denoising_running" in done.stdout
    assert "cut for 5 s in decoder" in done.stdout
