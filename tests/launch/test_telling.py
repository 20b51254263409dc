"""What a group tells its listeners, and what it does when they do not listen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from triptych.launch import telling
from triptych.launch.telling import Teller, show


def test_what_a_slow_listener_misses_is_counted_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "MOST_LINES", 10)
    seen: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(_name: str, line: str) -> None:
        begun.set()
        go_on.wait()
        seen.append(line)

    teller = Teller(slow)
    teller.start()
    teller.line("child", "first")
    begun.wait()
    for i in range(1000):
        teller.line("child", str(i))
    go_on.set()
    for _ in range(10_000):
        if len(seen) == 11:
            break
        threading.Event().wait(0.01)
    teller.line("child", "last")
    teller.close(60)
    assert seen == ["first", *map(str, range(10)), "(990 lines came faster than they could be shown)", "last"]


def test_everything_is_told_in_its_order_also_after_a_failure() -> None:
    seen: list[str] = []

    def fail_once(_name: str, line: str) -> None:
        seen.append(line)
        if len(seen) == 1:
            raise SystemExit

    teller = Teller(fail_once)
    teller.start()
    teller.line("child", "a")
    teller.later(lambda: seen.append("died"))
    teller.line("child", "b")
    teller.close(60)
    assert seen == ["a", "died", "b"]


def test_a_listener_that_hangs_does_not_keep_the_teller() -> None:
    hang = threading.Event()
    teller = Teller(lambda _name, _line: void(hang.wait()))
    teller.start()
    teller.line("child", "a")
    teller.close(0.01)
    hang.set()


def void(_: object) -> None:
    """Nothing."""


def test_a_program_whose_reader_has_gone_ends_well() -> None:
    """Symptom: a closed pipe raised where something was printed, and once more when the process ended."""
    code = "import sys; from triptych.launch.telling import show\nfor i in range(9): show(str(i), sys.stdout)\nprint(1)"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show("ready", sys.stdout)
    assert capsys.readouterr().out == "ready\n"
