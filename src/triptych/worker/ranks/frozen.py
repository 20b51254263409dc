"""Notices a follower that was stopped (SIGSTOP, a debugger), which neither dies nor answers.

The kernel is asked and not the follower: one that computes, compiles or loads for minutes may not get around to an
answer, and is not frozen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

import psutil

LOOK_SECONDS: Final = 1.0
_LOOKS: Final = 4
"""So often in a row a process must be found stopped: whoever stopped it may have meant to let it go on at once."""
_STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class FrozenWatch:
    """Watches processes by rank, and calls ``lost`` once, with the first that stays stopped.

    `run` is for a thread of its own and returns after that or after `close`.
    """

    def __init__(self, pids: Mapping[int, int], lost: Callable[[int, str], None]) -> None:
        self._processes = {rank: psutil.Process(pid) for rank, pid in pids.items()}
        self._stopped = dict.fromkeys(pids, 0)
        """Looks in a row that found a rank stopped."""
        self._lost = lost
        self._closed = threading.Event()

    def run(self) -> None:
        """Look about once a second."""
        while not self._closed.wait(LOOK_SECONDS):
            if (rank := self.look()) is not None:
                self._lost(rank, "its process is stopped")
                return

    def look(self) -> int | None:
        """Look once; the rank that has now been stopped for too long, if there is one."""
        for rank, process in self._processes.items():
            self._stopped[rank] = self._stopped[rank] + 1 if _is_stopped(process) else 0
            if self._stopped[rank] >= _LOOKS:
                return rank
        return None

    def close(self) -> None:
        """Let `run` return."""
        self._closed.set()


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in _STOPPED
    except psutil.Error:  # it has ended, which is heard of elsewhere
        return False
