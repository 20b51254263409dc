"""Tells listeners what a group does, without ever waiting for them: a listener may print to a terminal that is stopped,
to a pipe whose reader has gone, or fail, and neither may a child's pipe fill up nor a death go unnoticed for that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger(__name__)

MOST_LINES = 10_000
"""Lines that wait for a listener; what comes while there are as many is left out, and their number told."""

_GONE = (errno.EPIPE, errno.EIO)
"""What writing to a closed pipe or a vanished terminal fails with."""


def show(text: str, stream: TextIO) -> None:
    """Print a line. What cannot be printed is lost; a stream that nobody can read any more goes nowhere from then on,
    so that nothing else that writes to it fails, the end of the process included."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno in _GONE:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


class Teller:
    """Calls its listeners from one thread, in the order of what happened. `line` and `later` never block nor raise."""

    def __init__(self, output: Callable[[str, str], None]) -> None:
        self._output = output
        self._waiting: deque[Callable[[], None]] = deque()
        self._lines = 0
        self._left_out = 0
        self._closed = False
        self._changed = threading.Condition()
        self._complained = False
        self._thread = threading.Thread(target=self._tell, name="tell-listeners", daemon=True)

    def start(self) -> None:
        """Begin to call."""
        self._thread.start()

    def line(self, name: str, text: str) -> None:
        """A child has printed a line."""
        with self._changed:
            if self._lines >= MOST_LINES:
                self._left_out += 1
                return
            if self._left_out:
                self._add_line(name, f"({self._left_out} lines came faster than they could be shown)")
                self._left_out = 0
            self._add_line(name, text)
            self._changed.notify()

    def later(self, call: Callable[[], None]) -> None:
        """Something happened that a listener is to be called for."""
        with self._changed:
            self._waiting.append(call)
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Return when everything has been told, after ``seconds`` at the latest."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _add_line(self, name: str, text: str) -> None:
        def tell() -> None:
            with self._changed:
                self._lines -= 1
            self._output(name, text)

        self._lines += 1
        self._waiting.append(tell)

    def _tell(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                call = self._waiting.popleft()
            try:
                call()
            except BaseException as error:  # the listener's own trouble: the next thing is told all the same
                if not self._complained:
                    self._complained = True
                    log.warning("what a group has to tell does not arrive: %r", error)
