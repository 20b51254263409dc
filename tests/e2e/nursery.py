"""Role processes that need not import torch and diffusers anew: each is forked off one process that has done so.

Importing is most of what starting a role costs, and the tests start about a hundred. What is forked is a process as any
other: own session, own command line to parse, own sockets, model and threads, to be killed, frozen and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

from triptych.launch.supervised import ENVIRONMENT

_MESSAGE_BYTES = 1 << 16


class Nursery:
    """The caller's side: starts the process that forks, and knows what became of each child."""

    def __init__(self, line: socket.socket, pid: int, wait: Callable[[], object]) -> None:
        self._line = line
        self.pid = pid
        """The parent of all children."""
        self._wait = wait
        self._ordering = threading.Lock()
        self._news = threading.Condition()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._gone = False
        threading.Thread(target=self._listen, name="nursery", daemon=True).start()
        atexit.register(self.close)

    def _listen(self) -> None:
        """Note who was started and who has ended, until the process that forks is gone."""
        while True:
            try:
                word = json.loads(self._line.recv(_MESSAGE_BYTES) or b"{}")
            except OSError:
                word = {}
            with self._news:
                if "started" in word:
                    self._started.append(word["started"])
                    self._ended.pop(word["started"], None)  # of one that had the same number long ago
                elif "ended" in word:
                    self._ended[word["ended"]] = word["status"]
                else:
                    self._gone = True
                self._news.notify_all()
                if self._gone:
                    return

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path,
        stdin: int,
        output: int,
        kept: Sequence[int] = (),
    ) -> int:
        """Fork one that does what ``python COMMAND`` would, with one descriptor more at most under the number that it
        has here; its process id. The descriptors stay the caller's."""
        order = {"command": list(command), "environ": dict(environ), "cwd": str(cwd), "kept": list(kept)}
        with self._ordering, self._news:
            socket.send_fds(self._line, [json.dumps(order).encode()], [stdin, output, *kept])
            self._news.wait_for(lambda: self._started or self._gone)
            assert self._started, "the process that forks has ended"
            return self._started.pop()

    def status(self, pid: int, seconds: float | None = 0.0) -> int | None:
        """How a child ended, as `subprocess` says it; None while it runs, after so many seconds at most."""
        with self._news:
            self._news.wait_for(lambda: pid in self._ended or self._gone, seconds)
            return self._ended.get(pid)

    def close(self) -> None:
        """End it, and with it whatever child still runs."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._wait()
        self._line.close()


_own: list[Nursery] = []
"""The one of this process, once it has one."""


def nursery() -> Nursery:
    """The one of this process."""
    if not _own:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            # Its own session: what is meant for the test run's terminal is not meant for it. Threads that OpenMP starts
            # as torch is imported would be lost in every child.
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True, env=environ)
        _own.append(Nursery(ours, process.pid, process.wait))
    return _own[0]


def fork_nursery() -> None:
    """Give this process, which was forked itself and has one thread, a nursery of its own that imports nothing anew."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if child := os.fork():
        theirs.close()
        _own.append(Nursery(ours, child, lambda: os.waitpid(child, 0)))
        return
    ours.close()
    sys.exit(_run(_serve(theirs)))


class Forked:
    """One child; what `subprocess.Popen` offers of it, as far as the tests need that.

    ``command``: what would follow `python`, either ``-c CODE`` or ``-m MODULE WORDS``. ``kept``: a descriptor that it
    has too, under the same number.
    """

    stdout: IO[str] | None = None
    """What it prints, where that comes through a pipe."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], cwd: Path, output: int, kept: Sequence[int] = ()
    ) -> None:
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        self.stdin = os.fdopen(ours, "wb", buffering=0)
        try:
            supervised = {**environ, ENVIRONMENT: str(nursery().pid)}
            self.pid = nursery().start(command, supervised, cwd, theirs, output, kept)
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._status(0.0)

    def wait(self, timeout: float | None = 60.0) -> int:
        """Its exit status; raises `subprocess.TimeoutExpired`."""
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("triptych", timeout)
        return status

    def _status(self, seconds: float | None) -> int | None:
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


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Meanwhile what starts modules of Triptych from this process gets them forked, in sessions of their own."""
    nursery()  # itself no fork
    plain: Any = subprocess.Popen

    def start(command: Sequence[str], **how: Any) -> Any:
        if list(command[:2]) != [sys.executable, "-m"] or not command[2].startswith("triptych."):
            return plain(command, **how)
        reading, output = os.pipe2(os.O_CLOEXEC) if how.get("stdout") == subprocess.PIPE else (None, 2)
        try:
            child = Forked(command[1:], how.get("env", os.environ), Path.cwd(), output, how.get("pass_fds", ()))
        finally:
            if reading is not None:
                os.close(output)
        if reading is not None:
            child.stdout = os.fdopen(reading, errors=how.get("errors"))
        return child

    with mock.patch("subprocess.Popen", start):
        yield


def _preload() -> None:
    gc.disable()
    import diffusers
    import transformers

    import triptych.launch.serving
    import triptych.worker.process
    import triptych.worker.ranks.leader

    loaded = [diffusers.WanModularPipeline, diffusers.WanTransformer3DModel, diffusers.AutoencoderKLWan]
    loaded += [transformers.UMT5EncoderModel, triptych.launch.serving, triptych.worker.process]
    gc.freeze()  # what no child need look at, nor so copy
    gc.enable()
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
            data, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 3)
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


def _become(order: Mapping[str, Any], stdin: int, output: int, *kept: int) -> None:
    os.setsid()
    for descriptor, place in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    for descriptor in (stdin, output):
        os.close(descriptor)
    for descriptor, place in zip(kept, order["kept"], strict=True):
        if descriptor != place:
            os.dup2(descriptor, place)
            os.close(descriptor)
        os.set_inheritable(place, True)
    os.chdir(str(order["cwd"]))
    os.environ.clear()
    os.environ.update(order["environ"])


def _run(command: Sequence[str]) -> None:
    how, what, *words = command
    sys.argv = [what, *words]
    if how == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _preload()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
