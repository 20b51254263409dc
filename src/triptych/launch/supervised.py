"""The child's side of supervision: a process that was started by a group never outlives it.

The group's death reaches the child twice: the kernel sends SIGTERM when the supervising thread is gone, and the
standard input of the child, whose other end the group holds, comes to its end (also where no kernel sends the signal).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

ENVIRONMENT = "TRIPTYCH_SUPERVISOR"
"""Set by a group for its children: the supervisor's process id."""

GRACE_SECONDS = 8.0
"""How long a child may take to stop by itself once its group is gone."""

_PR_SET_PDEATHSIG = 1
_KERNEL_SIGNALS = sys.platform == "linux"


def follow_supervisor() -> None:
    """Stop this process when its supervisor ends. Does nothing in a process that no group started."""
    supervisor = os.environ.pop(ENVIRONMENT, None)
    if supervisor is None:
        return
    if _KERNEL_SIGNALS:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(supervisor):  # it died before the kernel knew of our wish
        os._exit(1)
    threading.Thread(target=_await_end, name="follow-supervisor", daemon=True).start()


def _await_end() -> None:
    while True:
        try:
            if not os.read(0, 4096):
                break
        except OSError:
            break
    if not _KERNEL_SIGNALS:  # never both: a second SIGTERM means to end on the spot
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
