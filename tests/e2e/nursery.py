"""Role processes that need not import torch and diffusers anew: each is forked off one process that has done so.

Importing is most of what starting a role costs, and the tests start about a hundred. What is forked is a process as any
other: own session, own command line to parse, own sockets, model and threads, to be killed, frozen and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from triptych.launch.supervised import ENVIRONMENT

_MESSAGE_BYTES = 1 << 16


class Nursery:
    """The caller's side: starts the process that forks, and knows what became of each child."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            # Its own session: what is meant for the test run's terminal is not meant for it. Threads that OpenMP starts
            # as torch is imported would be lost in every child.
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True, env=environ)
        self._line = ours
        self._ended: dict[int, int] = {}
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """The parent of all children."""
        return self._process.pid

    def start(self, command: Sequence[str], environ: Mapping[str, str], cwd: Path, stdin: int, output: int) -> int:
        """Fork one that does what ``python COMMAND`` would; its process id. The descriptors stay the caller's."""
        order = json.dumps({"command": list(command), "environ": dict(environ), "cwd": str(cwd)}).encode()
        socket.send_fds(self._line, [order], [stdin, output])
        while True:
            word = json.loads(self._line.recv(_MESSAGE_BYTES) or b'{"gone": true}')
            assert "gone" not in word, "the process that forks has ended"
            if "started" in word:
                pid = int(word["started"])
                self._ended.pop(pid, None)  # of one that had the same number long ago
                return pid
            self._ended[word["ended"]] = word["status"]

    def status(self, pid: int, seconds: float = 0.0) -> int | None:
        """How a child ended, as `subprocess` says it; None while it runs, after so many seconds at most."""
        deadline = time.monotonic() + seconds
        while pid not in self._ended:
            self._line.settimeout(max(1e-6, deadline - time.monotonic()))
            try:
                word = json.loads(self._line.recv(_MESSAGE_BYTES))
            except TimeoutError:
                return None
            finally:
                self._line.settimeout(None)
            self._ended[word["ended"]] = word["status"]
        return self._ended[pid]

    def close(self) -> None:
        """End it, and with it whatever child still runs."""
        self._line.close()
        self._process.wait()


@functools.cache
def nursery() -> Nursery:
    """The one of this test run's process."""
    return Nursery()


class Forked:
    """One child; what `subprocess.Popen` offers of it, as far as the tests need that.

    ``command``: what would follow `python`, either ``-c CODE`` or ``-m triptych.cli.main WORDS``.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], cwd: Path, output: IO[Any]) -> None:
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        self.stdin = os.fdopen(ours, "wb", buffering=0)
        try:
            supervised = {**environ, ENVIRONMENT: str(nursery().pid)}
            self.pid = nursery().start(command, supervised, cwd, theirs, output.fileno())
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._status(0.0)

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit status; raises `subprocess.TimeoutExpired`."""
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("triptych", timeout)
        return status

    def _status(self, seconds: float) -> int | None:
        status = nursery().status(self.pid, seconds)
        if status is not None:
            self.stdin.close()
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to it, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a crash would."""
        self.send_signal(signal.SIGKILL)


def _preload() -> None:
    import diffusers
    import transformers

    import triptych.launch.serving
    import triptych.worker.process

    loaded = [diffusers.WanModularPipeline, diffusers.WanTransformer3DModel, diffusers.AutoencoderKLWan]
    loaded += [transformers.UMT5EncoderModel, triptych.launch.serving, triptych.worker.process]
    tasks = list(Path("/proc/self/task").iterdir())
    assert len(tasks) == 1, f"{len(tasks)} threads after importing {loaded}: forking would lose the others"


def _serve(line: socket.socket) -> list[str]:
    """Fork on request until the line ends; returns its command in each child."""
    ended_read, ended_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(ended_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(line, selectors.EVENT_READ)
    selector.register(ended_read, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == ended_read:
                os.read(ended_read, 4096)
                _collect(line)
                continue
            data, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 2)
            if not data:
                os._exit(0)  # the children notice by themselves
            order = json.loads(data)
            if child := os.fork():
                for descriptor in descriptors:
                    os.close(descriptor)
                line.send(json.dumps({"started": child}).encode())
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            for descriptor in (ended_read, ended_write):
                os.close(descriptor)
            line.close()
            _become(order, *descriptors)
            return order["command"]


def _collect(line: socket.socket) -> None:
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        line.send(json.dumps({"ended": child, "status": os.waitstatus_to_exitcode(status)}).encode())


def _become(order: Mapping[str, object], stdin: int, output: int) -> None:
    os.setsid()
    for descriptor, place in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    for descriptor in (stdin, output):
        os.close(descriptor)
    os.chdir(str(order["cwd"]))
    os.environ.clear()
    os.environ.update(order["environ"])  # type: ignore[call-overload]


if __name__ == "__main__":
    _preload()
    _how, _what, *_words = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [_what, *_words]
    if _how == "-c":
        exec(compile(_what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        from triptych.cli.main import main

        sys.exit(main())
