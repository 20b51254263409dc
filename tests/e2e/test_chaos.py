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
    "mooncake-denoiser-kill-denoising_waiting",
    "mooncake-denoiser-freeze-decoder_waiting",
    "shm-denoiser-freeze-denoising_running",
    "mooncake-decoder-kill-decoder_waiting",
    "mooncake-server-kill-encoder_running",
    "shm-server-kill-encoder_waiting",
    "shm-server-kill-denoising_waiting",
    "mooncake-server-kill-denoising_running",
    "mooncake-server-kill-decoder_running",
    "shm-server-stop-denoising_running",
}
CASES = all_cases()


@pytest.fixture(scope="module")
def arena(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A deployment on the plane of the parameter; when all is over nothing of it may be left."""
    with Deployment(tmp_path_factory.mktemp(request.param), plane=request.param) as deployment:
        yield Arena(deployment.start_all())
    logs = "".join(path.read_text(errors="replace") for path in deployment.folder.glob("*.log"))
    assert "Traceback" not in logs, logs[logs.index("Traceback") - 2000 :][:5000]


def _param(case: Case) -> object:
    marks = () if str(case) in QUICK else (pytest.mark.chaos,)
    return pytest.param(case.plane, case, id=str(case), marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arena", "case"), [_param(case) for plane in PLANES for case in CASES if case.plane == plane], indirect=["arena"]
)
def test_every_accepted_request_is_done_with_the_bytes_of_an_undisturbed_run(arena: Arena, case: Case) -> None:
    jobs = arena.strike(case)
    arena.settle(jobs)
    until(arena.at_rest, "every lease and copy being given back")


def test_the_table_is_complete_and_the_quick_cases_are_of_it() -> None:
    assert len(CASES) == len(VICTIMS) * len(STATES) * len(BLOWS) >= 60
    assert {str(case) for case in CASES} >= QUICK
    assert len(QUICK) == 12
