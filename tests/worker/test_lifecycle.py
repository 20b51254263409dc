"""Names, signals and the way out of the role process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from triptych.ids import Role
from triptych.worker.lifecycle import instance_id, new_epoch

URL = "tcp://127.0.0.1:19001"


def test_an_instance_keeps_its_name_over_restarts_and_shares_it_with_none() -> None:
    name = instance_id((Role.DENOISER,), "host", URL)
    assert name == instance_id((Role.DENOISER,), "host", URL)
    assert name.startswith("denoiser-19001-")
    others = [
        instance_id((Role.DENOISER,), "another host", URL),
        instance_id((Role.DENOISER,), "host", "tcp://127.0.0.1:19002"),
        instance_id((Role.DENOISER,), "host", "tcp://10.0.0.1:19001"),
        instance_id((Role.ENCODER, Role.DENOISER), "host", URL),
    ]
    assert len({name, *others}) == 5


def test_every_life_has_an_epoch_of_its_own() -> None:
    assert len({new_epoch() for _ in range(100)}) == 100


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    process = child(
        "import signal, time\n"
        "from triptych.worker.lifecycle import on_stop_signals\n"
        "on_stop_signals(lambda name: print(name, flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number


@pytest.mark.parametrize(("code", "seen"), [(0, 1), (3, 3)])
def test_a_process_that_hangs_on_its_way_out_ends_all_the_same(code: int, seen: int) -> None:
    process = child(
        "import threading\n"
        "from triptych.worker.lifecycle import exit_by\n"
        f"exit_by(0.1, {code})\n"
        "threading.Event().wait()\n"
    )  # fmt: skip
    with process:
        assert process.wait(timeout=60) == seen
