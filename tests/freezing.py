"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 60.0
"""Seconds."""
_STILL = frozenset("TtZX")
"""States of a thread that runs no more, until it is let go or for good."""


def freeze(pid: int) -> None:
    """Stop a process, and return when it stands still. A busy machine takes a while for that: until one of its threads
    has had its turn to take the signal, all of them go on."""
    os.kill(pid, signal.SIGSTOP)
    until_still(pid)


def until_still(pid: int) -> None:
    """Wait until every thread of a process that was sent SIGSTOP stands still, or has ended."""
    deadline = time.monotonic() + PATIENCE
    while not set(states := "".join(_states(pid))) <= _STILL:
        assert time.monotonic() < deadline, f"{PATIENCE:g} s after SIGSTOP the threads of {pid} are {states}"
        time.sleep(0.001)


def _states(pid: int) -> Iterator[str]:
    """The state of each thread, as /proc has it."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return
