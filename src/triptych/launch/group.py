"""A group of `triptych serve` processes on one machine: started, watched, restarted when they die, stopped together.

One supervising thread starts every child, because Linux ties a child's parent-death signal to the thread that started
it. Each child runs in a session of its own, so that Ctrl+C in a terminal reaches the supervisor alone, which then stops
the children in good order. Threads of their own read what the children print, and another one calls listeners.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from triptych.errors import ConfigError, TriptychError
from triptych.launch.supervised import ENVIRONMENT
from triptych.launch.telling import Teller, show

log = logging.getLogger(__name__)

ProcessState: TypeAlias = Literal["starting", "running", "restarting", "stopped", "failed"]

FIRST_DELAY = 0.5
LONGEST_DELAY = 15.0
"""Seconds between a death and the next start: doubled from the first to the longest."""
GOOD_LIFE = 30.0
"""Seconds of life after which the delay starts from the first again."""
MOST_EARLY_DEATHS = 5
"""Deaths in a row after which a process that never had a good life is given up, and its group with it."""
STOP_SECONDS = 10.0
"""How long a child may take to stop before it is killed."""
COLLECT_SECONDS = 5.0
"""How long a killed child may take to be gone, which one that waits for a device or a disk cannot."""
TELL_SECONDS = 2.0
"""How long listeners may take to hear the last of what happened."""
EXIT_CONFIG = 2
"""Exit status of a process that has not served since its options or model cannot work; starting it again would not
help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """One process of a group."""

    name: str
    """E.g. ``encoder-0``."""
    command: tuple[str, ...]
    """The program and its arguments."""
    address: str
    """Where others reach it, for people to read."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that it gets besides the ones of this process."""
    withheld: frozenset[str] = frozenset()
    """Variables of this process that it does not get."""
    stop_turn: int = 0
    """Who has a lower one has ended before this process is asked to stop."""
    stop_seconds: float = STOP_SECONDS
    """How long after the group was asked to stop it may still be there, if that is later than `STOP_SECONDS` after it
    was asked itself; then it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """How a process of a group is doing."""

    name: str
    address: str
    pid: int | None
    state: ProcessState
    detail: str = ""
    restarts: int = 0


class LaunchError(TriptychError):
    """A group did not come up, or could not be supervised."""

    code = "launch_failed"


def restart_delay(deaths: int) -> float:
    """Seconds to wait before the next start after this many deaths in a row."""
    return min(FIRST_DELAY * 2 ** min(deaths - 1, 16), LONGEST_DELAY)


def print_line(name: str, line: str) -> None:
    """Show a child's line of output with the child's name before it."""
    show(f"[{name}] {line}", sys.stderr)


class _Child:
    """One process of the group over all its lives. Used by the supervising thread, but for the output reader."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[str] | None = None
        self.state: ProcessState = "starting"
        self.detail = ""
        self.started_at = 0.0
        self.start_again_at = 0.0
        self.deaths = 0
        self.proven = False
        self.hopeless = True
        """Whether every life so far ended of what no other start would mend, by what it said itself."""
        self.restarts = 0
        self.last_lines: deque[str] = deque(maxlen=20)
        self.reader: threading.Thread | None = None

    def start(self, now: float, teller: Teller, wake: threading.Event) -> None:
        """Raises OSError when there can be no such process."""
        self.process = subprocess.Popen(
            self.spec.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={
                **{name: value for name, value in os.environ.items() if name not in self.spec.withheld},
                **self.spec.environment,
                ENVIRONMENT: str(os.getpid()),
            },
        )
        self.started_at = now
        reader = threading.Thread(target=self._read, args=(self.process, teller, wake), daemon=True)
        reader.start()
        self.reader = reader

    def _read(self, process: subprocess.Popen[str], teller: Teller, wake: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout:  # closed here alone: closing waits for whoever reads
            for line in process.stdout:
                self.last_lines.append(line.rstrip())
                teller.line(self.spec.name, line.rstrip())
        wake.set()

    def signal(self, number: signal.Signals) -> None:
        """Send to the process, or with SIGKILL to everything in its session."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or what is left has
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            elif self.process.poll() is None:
                self.process.send_signal(number)

    def discard(self) -> None:
        """Close what belongs to a process that has ended."""
        if self.process is None:
            return
        self.signal(signal.SIGKILL)  # whatever it left behind in its session
        try:
            self.process.wait(COLLECT_SECONDS)
        except subprocess.TimeoutExpired:
            log.error("%s (pid %d) was killed and does not end", self.spec.name, self.process.pid)
        if self.reader is not None:
            self.reader.join(timeout=2.0)  # in vain where something that left the session has its output
            self.reader = None
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.process = None

    def status(self) -> ProcessStatus:
        process = self.process
        return ProcessStatus(
            name=self.spec.name,
            address=self.spec.address,
            pid=process.pid if process else None,
            state=self.state,
            detail=self.detail,
            restarts=self.restarts,
        )


class Group:
    """Processes that live and end together. Thread-safe; a context manager that stops them on the way out.

    ``output`` is given the name of a process and each line that it prints, ``on_change`` every new status; both are
    called from one thread, which nothing waits for.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        output: Callable[[str, str], None] = print_line,
        on_change: Callable[[ProcessStatus], None] | None = None,
    ) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._teller = Teller(output)
        self._on_change = on_change
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._failure: ConfigError | LaunchError | None = None
        self._thread = threading.Thread(target=self._supervise, name="supervise-group", daemon=True)

    def start(self) -> None:
        """Start every process. Returns at once."""
        self._teller.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop every process and wait for its end; idempotent. After this none of them is left."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def hurry(self) -> None:
        """Have a stop that waits for work to be finished wait no longer. May be called from a signal handler."""
        self._hurry.set()

    def __enter__(self) -> Group:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def failure(self) -> str | None:
        """Why the group cannot work, once it has given up and stopped everything; else None."""
        return None if self._failure is None else self._failure.message

    def check(self) -> None:
        """Raise `ConfigError` if the group has ended of a process that cannot start, `LaunchError` if of itself."""
        if self._failure is not None:
            raise self._failure

    def statuses(self) -> tuple[ProcessStatus, ...]:
        """How each process is doing now."""
        return tuple(child.status() for child in self._children)

    def wait(self, seconds: float) -> bool:
        """Wait for the group's end for so long; true when it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                now = time.monotonic()
                for child in self._children:
                    self._attend(child, now)
                self._wake.wait(0.2)
        except Exception as error:  # nobody watches the children any more, so none may stay
            log.exception("the supervision of the processes failed")
            self._failure = LaunchError(f"the processes cannot be supervised: {error!r}")
        finally:
            self._stopping.set()
            self._stop_all()
            self._teller.close(TELL_SECONDS)

    def _attend(self, child: _Child, now: float) -> None:
        if child.process is None:
            if now >= child.start_again_at and not self._stopping.is_set():
                self._start(child, now)
            return
        code = child.process.poll()
        if code is None:
            return
        reason = _reason(code)
        child.discard()
        self._died(child, now, reason, hopeless=code == EXIT_CONFIG)

    def _start(self, child: _Child, now: float) -> None:
        try:
            child.start(now, self._teller, self._wake)
        except OSError as error:  # of the program, or of a machine that has no room for a process now
            child.started_at = now
            child.last_lines.clear()
            hopeless = isinstance(error, FileNotFoundError | PermissionError)
            self._died(child, now, f"cannot be started: {error}", hopeless=hopeless)
        else:
            self._change(child, "running")

    def _died(self, child: _Child, now: float, reason: str, *, hopeless: bool) -> None:
        good = now - child.started_at >= GOOD_LIFE
        child.proven = child.proven or good
        child.deaths = 1 if good else child.deaths + 1
        child.hopeless = child.hopeless and hopeless
        # After a long life the word at its end is doubted once: it may have been spent with serving, or with loading.
        given_up = child.hopeless and (child.restarts > 0 or not child.proven)
        if given_up or (child.deaths >= MOST_EARLY_DEATHS and not child.proven):
            self._failure = ConfigError(f"{child.spec.name} cannot start: {_complaint(child.last_lines) or reason}")
            self._change(child, "failed", reason)
            self._stopping.set()
            return
        delay = restart_delay(child.deaths)
        child.start_again_at = now + delay
        child.restarts += 1
        self._change(child, "restarting", f"{reason}; again in {delay:g} s")

    def _stop_all(self) -> None:
        alive = [child for child in self._children if child.process is not None]
        begun = time.monotonic()
        if self._failure is not None:
            self._hurry.set()
        for turn in sorted({child.spec.stop_turn for child in alive}):
            self._stop_turn([child for child in alive if child.spec.stop_turn == turn], begun)
        lost = isinstance(self._failure, LaunchError)
        for child in self._children if lost else alive:
            self._change(child, "failed" if lost else "stopped")

    def _stop_turn(self, children: Sequence[_Child], begun: float) -> None:
        """End those whose turn it is. In a hurry, who was asked before is asked again, which means on the spot."""
        asked = time.monotonic()
        waits = not self._hurry.is_set()
        for child in children:
            child.signal(signal.SIGTERM)
        left = list(children)
        while left:
            now = time.monotonic()
            if waits and self._hurry.is_set():
                waits, asked = False, now
                for child in left:
                    child.signal(signal.SIGTERM)
            for child in tuple(left):
                assert child.process is not None
                longest = max(begun + child.spec.stop_seconds if waits else 0.0, asked + STOP_SECONDS)
                if child.process.poll() is not None or now >= longest:
                    child.discard()
                    left.remove(child)
            if left:
                time.sleep(0.02)

    def _change(self, child: _Child, state: ProcessState, detail: str = "") -> None:
        child.state, child.detail = state, detail
        if self._on_change is not None:
            self._teller.later(functools.partial(self._on_change, child.status()))


def _complaint(lines: Collection[str]) -> str:
    """The last line that speaks of an error, else the last one."""
    told = [line for line in lines if "error:" in line.lower() or "CRITICAL" in line] or list(lines)
    return told[-1] if told else ""


def _reason(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
