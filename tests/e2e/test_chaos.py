"""Kills, freezes and stops of every process in every state of a request: nothing that was accepted is lost. And what
was taken back, in whatever state, leaves nothing behind.

One deployment of real processes for each data plane is reused from case to case. `make chaos` runs all of them, a
normal test run every sixth or so.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests import asking
from tests.e2e.chaos import BLOWS, PLANES, STATES, VICTIMS, Arena, Case, all_cases
from tests.e2e.harness import Deployment, until

QUICK = {
    "shm-encoder-kill-encoder_waiting",
    "shm-encoder-freeze-denoising_running",
    "shm-denoiser-kill-decoder_waiting",
    "mooncake-denoiser-freeze-decoder_waiting",
    "mooncake-denoiser-kill-denoising_running",
    "shm-decoder-freeze-decoder_running",
    "mooncake-server-kill-encoder_running",
    "shm-server-kill-encoder_waiting",
    "shm-server-kill-denoising_waiting",
    "mooncake-server-kill-denoising_running",
    "mooncake-server-kill-decoder_running",
    "mooncake-server-stop-denoising_running",
}
CASES = all_cases()


class Arenas:
    """One deployment at a time, for as long as the plane stays the same; when it ends nothing of it may be left."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._open: tuple[str, Deployment, Arena] | None = None

    def get(self, plane: str) -> Arena:
        if self._open is None or self._open[0] != plane:
            self.close()
            deployment = Deployment(self._factory.mktemp(plane), plane=plane)
            self._open = plane, deployment, Arena(deployment.start_all())
        return self._open[2]

    def close(self) -> None:
        if self._open is None:
            return
        _, deployment, _ = self._open
        self._open = None
        deployment.close()
        logs = "".join(path.read_text(errors="replace") for path in deployment.folder.glob("*.log"))
        assert "Traceback" not in logs, logs[max(0, logs.index("Traceback") - 2000) :][:5000]


@pytest.fixture(scope="module")
def arenas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arenas]:
    arenas = Arenas(tmp_path_factory)
    yield arenas
    arenas.close()


def _param(case: Case) -> object:
    return pytest.param(case, id=str(case), marks=() if str(case) in QUICK else (pytest.mark.chaos,))


SHORT = {"prompt": "a red ball", "num_inference_steps": 2, "size": "64x64"}
LONG = SHORT | {"num_inference_steps": 100, "size": "512x512"}
"""Takes many seconds."""


def nothing_goes_on(arena: Arena) -> None:
    """Everything is given back within seconds, and nobody computes for a request that is gone."""
    until(arena.at_rest, "every lease, copy and byte of a pool being given back", seconds=30)

    def nobody_computes() -> bool:
        steps = arena.steps()
        time.sleep(0.5)  # as long as it takes to compute many
        return arena.steps() == steps

    until(nobody_computes, "the last step being over", seconds=30)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", STATES)
def test_a_job_that_is_deleted_in_any_state_leaves_nothing_behind(arenas: Arenas, state: str) -> None:
    arena = arenas.get("shm")
    *others, (job, _) = arena.catch(state)
    api = arena.deployment.api
    asking.delete(f"{api.url}/v1/videos/{job}", trust_env=False).raise_for_status()
    arena.holder(state).signal(signal.SIGCONT)
    arena.settle(others)
    nothing_goes_on(arena)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", ["encoder_waiting", "denoising_waiting", "denoising_running", "decoder_waiting"])
def test_who_hangs_up_in_any_state_leaves_nothing_behind(arenas: Arenas, state: str) -> None:
    arena = arenas.get("shm")
    api, holder = arena.deployment.api, arena.holder(state)
    body = json.dumps(LONG if state == "denoising_running" else SHORT)
    kind = f"content-type: application/json\r\ncontent-length: {len(body)}"
    before = arena.steps()
    if state.endswith("waiting"):
        holder.signal(signal.SIGSTOP)
    with socket.create_connection(("127.0.0.1", arena.deployment.port)) as wire:
        wire.sendall(f"POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\n{kind}\r\n\r\n{body}".encode())
        until(lambda: api.info()["requests"].get(state), f"a request being in {state}")
    until(lambda: not api.info()["requests"].get(state), "the server hearing of that")
    holder.signal(signal.SIGCONT)
    nothing_goes_on(arena)
    assert arena.steps() - before < 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [_param(case) for plane in PLANES for case in CASES if case.plane == plane])
def test_every_accepted_request_is_done_with_the_bytes_of_an_undisturbed_run(arenas: Arenas, case: Case) -> None:
    arena = arenas.get(case.plane)
    arena.settle(arena.strike(case))
    until(arena.at_rest, "every lease and copy being given back")


def test_the_table_is_complete_and_the_quick_cases_are_of_it() -> None:
    assert len(CASES) == len(VICTIMS) * len(STATES) * len(BLOWS) >= 60
    assert {str(case) for case in CASES} >= QUICK
    assert len(QUICK) == 12
