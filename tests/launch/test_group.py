"""Real child processes: started, restarted, stopped, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import running
from triptych.errors import ConfigError
from triptych.launch.group import Group, LaunchError, ProcessSpec, ProcessStatus, restart_delay

SLEEPER = "import time; time.sleep(600)"
FOLLOWER = f"from triptych.launch.supervised import follow_supervisor as f; f(); print('up', flush=True); {SLEEPER}"


def spec(code: str, name: str = "child") -> ProcessSpec:
    return ProcessSpec(name=name, command=(sys.executable, "-c", code), address="nowhere")


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.02)


class Lines:
    """Collects what the children print."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.seen.append((name, line))


def test_a_killed_child_is_started_again_and_named_as_such() -> None:
    changes: list[ProcessStatus] = []
    with Group([spec(SLEEPER)], on_change=changes.append) as group:
        until(lambda: group.statuses()[0].state == "running")
        first = group.statuses()[0].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: group.statuses()[0].pid not in (None, first))
        second = group.statuses()[0].pid
        assert second is not None
    assert [c.state for c in changes] == ["running", "restarting", "running", "stopped"]
    assert "killed by SIGKILL" in changes[1].detail
    assert not running(first)
    assert not running(second)


def test_a_child_that_cannot_work_ends_the_group_with_its_last_line() -> None:
    lines = Lines()
    hopeless = spec("import sys; print('no such model: x', flush=True); sys.exit(2)", "encoder-0")
    with Group([spec(SLEEPER), hopeless], output=lines) as group:
        until(lambda: group.wait(0.1))
        assert group.failure == "encoder-0 cannot start: no such model: x"
        assert [s.state for s in group.statuses()] == ["stopped", "failed"]
    assert ("encoder-0", "no such model: x") in lines.seen


def test_a_child_that_has_served_is_started_again_whatever_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: one that had been well for days and ended with status 2 stopped all the others, the server included."""
    monkeypatch.setattr("triptych.launch.group.GOOD_LIFE", 0.5)
    monkeypatch.setattr("triptych.launch.group.FIRST_DELAY", 0.01)
    lines = Lines()
    served = spec("import time; time.sleep(1); print('refused', flush=True); raise SystemExit(2)", "encoder-0")
    with Group([spec(SLEEPER), served], output=lines) as group:
        until(lambda: ("encoder-0", "refused") in lines.seen and group.statuses()[1].restarts == 1)
        assert group.failure is None
        assert group.statuses()[0].state == "running"


def test_a_child_that_takes_long_to_find_that_it_cannot_work_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes longer to load than what counts as a good life."""
    monkeypatch.setattr("triptych.launch.group.GOOD_LIFE", 0.05)
    monkeypatch.setattr("triptych.launch.group.FIRST_DELAY", 0.01)
    lines = Lines()
    loads = spec("import time; time.sleep(0.2); print('no memory for it', flush=True); raise SystemExit(2)")
    with Group([loads], output=lines) as group:
        until(lambda: group.wait(0.1))
        assert group.failure == "child cannot start: no memory for it"
    assert [line for _, line in lines.seen].count("no memory for it") == 2


def test_a_child_that_never_comes_up_is_given_up_after_some_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a process that crashed at every start was started again for ever, and nobody was told why."""
    monkeypatch.setattr("triptych.launch.group.FIRST_DELAY", 0.01)
    lines = Lines()
    with Group([spec("raise RuntimeError('broken installation')")], output=lines) as group:
        until(lambda: group.wait(0.1))
        assert group.failure == "child cannot start: RuntimeError: broken installation"
    assert [line for _, line in lines.seen].count("RuntimeError: broken installation") == 5


def test_a_deaf_child_is_killed_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); print(p.pid, flush=True); time.sleep(600)"
    )
    lines = Lines()
    monkeypatch.setattr("triptych.launch.group.STOP_SECONDS", 0.5)
    group = Group([replace(spec(deaf), stop_seconds=0.5)], output=lines)
    with group:
        until(lambda: bool(lines.seen))
        child, grandchild = group.statuses()[0].pid, int(lines.seen[0][1])
    assert child is not None
    assert not running(child)
    until(lambda: not running(grandchild))


def test_a_child_goes_on_whatever_becomes_of_those_who_should_see_its_output(tmp_path: Path) -> None:
    """Symptom: after `triptych up 2>&1 | grep -m1 ready` every child froze in its log as soon as a pipe was full."""

    def broken(_name: str, _line: str) -> None:
        raise BrokenPipeError

    stuck = threading.Event()

    def stopped(_name: str, _line: str) -> None:
        stuck.wait()

    for output in (broken, stopped):
        file = tmp_path / output.__name__
        talkative = f"for _ in range(20_000): print('x' * 99, flush=True)\nopen({str(file)!r}, 'w')\n{SLEEPER}"
        with Group([spec(talkative)], output=output) as group:
            until(file.exists)
            assert group.statuses()[0].state == "running"
        assert group.failure is None
    stuck.set()


def test_all_are_stopped_and_collected_when_the_listener_fails() -> None:
    """Symptom: a listener that raised ended the supervision, and children were left running."""
    pids: list[int | None] = []

    def fail(status: ProcessStatus) -> None:
        pids.append(status.pid)
        raise RuntimeError("no terminal")

    with Group([spec(SLEEPER), spec(SLEEPER)], on_change=fail) as group:
        until(lambda: len(pids) == 2)
        first = group.statuses()[0].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: group.statuses()[0].pid not in (None, first))
        pids += [status.pid for status in group.statuses()]
    assert group.failure is None
    assert [status.state for status in group.statuses()] == ["stopped", "stopped"]
    assert not any(running(pid) for pid in pids if pid)


def test_a_program_that_is_not_there_ends_the_group() -> None:
    """Symptom: the supervision ended without a word, and `triptych up` with status 0."""
    nothing = ProcessSpec(name="server", command=("/nonexistent",), address="nowhere")
    with Group([spec(SLEEPER), nothing]) as group:
        until(lambda: group.wait(0.1))
    with pytest.raises(ConfigError, match=r"server cannot start: .*No such file"):
        group.check()
    assert [status.state for status in group.statuses()] == ["stopped", "failed"]


def test_a_machine_that_has_no_room_for_a_process_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.launch.group.FIRST_DELAY", 0.01)
    real, refusals = subprocess.Popen, [BlockingIOError("no more processes"), OSError("no memory")]

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        if refusals:
            raise refusals.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr("triptych.launch.group.subprocess.Popen", start)
    changes: list[ProcessStatus] = []
    with Group([spec(SLEEPER)], on_change=changes.append) as group:
        until(lambda: group.statuses()[0].state == "running")
    assert "cannot be started: no more processes" in changes[1].detail
    assert [c.state for c in changes] == ["restarting", "restarting", "running", "stopped"]


def test_a_supervision_that_fails_leaves_nothing_running_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = subprocess.Popen, list[int]()

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        if started:
            raise RuntimeError("something that nobody thought of")
        process = real(*args, **kwargs)
        started.append(process.pid)
        return process

    monkeypatch.setattr("triptych.launch.group.subprocess.Popen", start)
    changes: list[ProcessStatus] = []
    with Group([spec(SLEEPER, "first"), spec(SLEEPER, "second")], on_change=changes.append) as group:
        until(lambda: group.wait(0.1))
    with pytest.raises(LaunchError, match=r"cannot be supervised: .*something that nobody"):
        group.check()
    assert [status.state for status in group.statuses()] == ["failed", "failed"]
    assert [c.state for c in changes if c.name == "second"] == ["failed"]
    assert not any(running(pid) for pid in started)


def test_what_left_the_session_of_a_child_with_its_output_does_not_hold_up_the_group() -> None:
    escape = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True)\n"
        f"print(p.pid, flush=True)\n{SLEEPER}"
    )
    lines = Lines()
    with Group([spec(escape)], output=lines) as group:
        until(lambda: bool(lines.seen))
    assert [status.state for status in group.statuses()] == ["stopped"]
    os.kill(int(lines.seen[0][1]), signal.SIGKILL)


def leaver(name: str, turn: int, seconds: float, stop_seconds: float = 600.0) -> ProcessSpec:
    """Takes its time to leave, unless it is asked twice."""
    code = (
        "import signal, sys, time\n"
        "def leave(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        f"    print('asked', flush=True); time.sleep({seconds}); print('left', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        f"print('up', flush=True)\n{SLEEPER}"
    )
    return replace(spec(code, name), stop_turn=turn, stop_seconds=stop_seconds)


def test_the_server_is_asked_to_stop_when_its_instances_have_finished_their_work() -> None:
    """Symptom: server and instances were stopped at the same time, so that --drain-timeout had no effect."""
    lines = Lines()
    with Group([leaver("server", 2, 0), leaver("encoder", 0, 0.5), leaver("denoiser", 1, 0.5)], output=lines):
        until(lambda: len(lines.seen) == 3)
    assert lines.seen[3:] == [
        ("encoder", "asked"),
        ("encoder", "left"),
        ("denoiser", "asked"),
        ("denoiser", "left"),
        ("server", "asked"),
        ("server", "left"),
    ]


def test_one_that_takes_longer_than_it_may_is_killed_and_the_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triptych.launch.group.STOP_SECONDS", 0.5)
    lines = Lines()
    with Group([leaver("server", 1, 0), leaver("encoder", 0, 600, stop_seconds=1.0)], output=lines) as group:
        until(lambda: len(lines.seen) == 2)
    assert ("server", "left") in lines.seen or lines.seen[-1] == ("server", "asked")
    assert ("encoder", "left") not in lines.seen
    assert [status.state for status in group.statuses()] == ["stopped", "stopped"]


def test_a_stop_that_waits_for_work_can_be_hurried() -> None:
    lines = Lines()
    group = Group([leaver("server", 1, 0), leaver("encoder", 0, 600)], output=lines)
    group.start()
    until(lambda: len(lines.seen) == 2)
    stopper = threading.Thread(target=group.stop)
    stopper.start()
    until(lambda: ("encoder", "asked") in lines.seen)
    group.hurry()
    stopper.join()
    assert ("encoder", "left") not in lines.seen
    assert ("server", "left") in lines.seen


def test_stopping_is_idempotent_and_works_from_any_thread() -> None:
    group = Group([spec(SLEEPER), spec(SLEEPER)])
    group.start()
    until(lambda: all(s.state == "running" for s in group.statuses()))
    stoppers = [threading.Thread(target=group.stop) for _ in range(3)]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        stopper.join()
    assert [s.state for s in group.statuses()] == ["stopped", "stopped"]


def test_a_group_that_never_started_can_be_stopped() -> None:
    Group([spec(SLEEPER)]).stop()


def test_delays_between_restarts_grow_to_a_bound() -> None:
    assert [restart_delay(n) for n in (1, 2, 3, 4, 5, 6, 7, 1000)] == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    """Symptom: kill -9 of the launcher left role processes behind that held their ports and GPUs."""
    launcher = (
        "import os, sys, time\n"
        "from triptych.launch.group import Group, ProcessSpec\n"
        f"spec = ProcessSpec(name='c', command=(sys.executable, '-c', {FOLLOWER!r}), address='')\n"
        "group = Group([spec, spec], output=lambda n, l: os.write(1, f'{l}\\n'.encode()))\n"
        "group.start()\n"
        "while any(s.pid is None for s in group.statuses()): time.sleep(0.01)\n"
        "os.write(1, ' '.join(str(s.pid) for s in group.statuses()).encode() + b'\\n')\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(3)]
    (pids,) = ([int(word) for word in words] for words in lines if words != ["up"])
    assert len(pids) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not any(running(pid) for pid in pids))
