"""Kills, freezes and stops of every process in every state of a request: nothing that was accepted is lost.

One deployment of real processes for each data plane is reused from case to case. `make chaos` runs all of them, a
normal test run every sixth or so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
