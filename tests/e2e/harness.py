"""Real deployments for the end-to-end tests: `triptych` processes started one by one, as a user would.

Everything goes over HTTP and signals, as for a user; nothing here reaches into a process.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal as signals
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.e2e.nursery import Forked
from tests.freezing import until_still
from triptych.launch.ports import free_ports
from triptych.launch.supervised import ENVIRONMENT

PATIENCE = 120.0
"""Seconds that anything may take on a busy machine before a test gives up."""

ROLES = ("encoder", "denoiser", "decoder")

DEATH_SECONDS = 3.0
"""Within which the server must have missed a process that ended, counted from when it is certain to have ended."""
SURELY_HEARD = 1.4
"""Seconds after a freeze in which an instance cannot have been missed by its silence yet: it is given up 2.5 s after
its last heartbeat, which is up to a second old by then."""
SILENCE_SECONDS = 10.0
"""Within which it must have missed one that is frozen or cut off."""

SMALL: dict[str, Any] = {
    "prompt": "a red ball moves right on blue",
    "size": "64x64",
    "num_frames": 5,
    "num_inference_steps": 3,
    "guidance_scale": 3.0,
    "seed": 7,
}
"""A request that takes a fraction of a second."""


def environment() -> dict[str, str]:
    """One thread for each process, whose results then do not depend on who else computes; no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", ENVIRONMENT: str(os.getpid())}


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE, every: float = 0.02) -> Any:
    """Wait until ``condition`` gives something true, and return that. It is looked at ``every`` so many seconds: a look
    through the API costs the server milliseconds that a computing role on the same cores then lacks."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(every)


def running(pid: int) -> bool:
    """Whether a process is there and not just waiting to be collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Process:
    """One `triptych` process in a session of its own; what it prints is kept in a file.

    ``forked``: it comes from the nursery, as do the processes that it starts, and so without the seconds that a role
    takes to import its libraries.
    """

    def __init__(
        self, name: str, words: Iterable[str], folder: Path, cwd: Path | None = None, *, forked: bool = False
    ) -> None:
        self.name = name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        words = list(words)
        command = ["-m", "tests.e2e.grouped" if forked and words[0] == "up" else "triptych.cli.main", *words]
        with self.log.open("wb") as output:
            if forked:
                self._process = Forked(command, environment(), cwd or folder, output.fileno())
                return
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,  # with the environment's entry: none outlives a killed test run
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
                cwd=cwd or folder,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """All that it printed so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: signals.Signals) -> None:
        """Send a signal to it. What was stopped stands still on return."""
        self._process.send_signal(number)
        if number == signals.SIGSTOP:
            until_still(self.pid)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()
        self._hang_up()

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, seconds: float = PATIENCE) -> int | str:
        """Wait for its end; its exit status, or a word when it had to be killed."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"did not end within {seconds:g} s"
        finally:
            self._hang_up()

    def stop(self, number: signals.Signals = signals.SIGTERM) -> int | str:
        """Ask it to end and wait for that; its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self.end()


def stop_all(processes: Iterable[Process], number: signals.Signals = signals.SIGTERM) -> None:
    """End all that live, at once, and only then say which of them did not end well by themselves."""
    live = [process for process in processes if process.status is None]
    for process in live:
        process.signal(signals.SIGCONT)
        process.signal(number)
    bad = [f"{process.name}: {status}\n{process.output()[-3000:]}" for process in live if (status := process.end())]
    assert not bad, "\n".join(bad)


class Api:
    """The HTTP API as a plain user speaks it."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def ready(self) -> bool:
        try:
            return self._http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def reasons(self) -> list[str]:
        """Why the server is not ready."""
        return self._http.get("/ready").json()["reasons"]

    @contextlib.contextmanager
    def healthy(self) -> Iterator[None]:
        """Ask /health all the while: whatever happens to instances, each answer must be 200."""
        answers: list[int | str] = []
        over = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as http:
                while True:
                    try:
                        answers.append(http.get("/health").status_code)
                    except httpx.TransportError as error:
                        answers.append(repr(error))
                    if over.wait(0.05):
                        return

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
        finally:
            over.set()
            asking.join()
        assert set(answers) == {200}, collections.Counter(answers)

    def info(self) -> dict[str, Any]:
        """/server_info."""
        return self._http.get("/server_info").raise_for_status().json()

    def metrics(self) -> str:
        return self._http.get("/metrics").raise_for_status().text

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self._http.post(path, json=dict(body))

    def submit(self, **fields: Any) -> str:
        """Start a small video job, with ``fields`` instead of its own; the job's id."""
        answer = self.post("/v1/videos", SMALL | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def job(self, job: str) -> dict[str, Any]:
        return self._http.get(f"/v1/videos/{job}").raise_for_status().json()

    def ended(self, job: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait for the job's end, good or bad; the job as it then is."""

        def look() -> dict[str, Any] | None:
            video = self.job(job)
            return video if video["status"] in ("completed", "failed") else None

        return until(look, f"the end of {job}", seconds, every=0.1)

    def done(self, job: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait for the job, which must end well."""
        video = self.ended(job, seconds)
        assert video["status"] == "completed", video["error"]
        return video

    def delete(self, job: str) -> None:
        """Stop the job if it lives, and have it forgotten."""
        self._http.delete(f"/v1/videos/{job}").raise_for_status()

    def content(self, job: str) -> bytes:
        """The finished file."""
        return self._http.get(f"/v1/videos/{job}/content").raise_for_status().content

    def make(self, **fields: Any) -> bytes:
        """A small video from prompt to file."""
        job = self.submit(**fields)
        self.done(job)
        return self.content(job)


class Deployment:
    """A server and role instances, each started by its own command, in any order."""

    forked = True
    """Whether instances come from the nursery."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "tiny",
        plane: str = "shm",
        queue_timeout: float = 600,
        task_ports: tuple[int, int, int] | None = None,
    ) -> None:
        self.folder = folder
        self.model = model
        self.plane = plane
        self.queue_timeout = queue_timeout
        self.task_ports = task_ports
        """Of encoder, transformer and decoder, for tasks in three posts."""
        self.port, self.frontend, *_ = free_ports(5)
        self.api = Api(f"http://127.0.0.1:{self.port}")
        self.server: Process | None = None
        self.instances: dict[str, Process] = {}
        self.work_ports: dict[str, int] = {}

    def start_server(self, *words: str) -> Process:
        """Start the server, with more command line words if need be."""
        self.server = Process(
            "server",
            ["serve", "--disagg-role", "server", "--port", str(self.port), "--scheduler-port", str(self.frontend),
             "--queue-timeout", str(self.queue_timeout), "--output-dir", str(self.folder / "outputs"),
             *(["--task-ports", ",".join(map(str, self.task_ports))] if self.task_ports else []), *words],
            self.folder,
        )  # fmt: skip
        return self.server

    def start(self, name: str, *words: str, cwd: Path | None = None) -> Process:
        """Start the instance ``name``, e.g. ``denoiser-1``, or start it again at its old port after its end."""
        role = name.partition("-")[0]
        port = self.work_ports.setdefault(name, free_ports(1)[0])
        self.instances[name] = Process(
            name,
            ["serve", "--model-path", self.model, "--device", "cpu", "--disagg-role", role,
             "--disagg-server-addr", f"tcp://127.0.0.1:{self.frontend}", "--scheduler-port", str(port),
             "--disagg-transfer", self.plane, "--disagg-transfer-pool-size", "64MiB", *words],
            self.folder,
            cwd,
            forked=self.forked,
        )  # fmt: skip
        return self.instances[name]

    def start_all(self, **counts: int) -> Self:
        """The server and so many instances of each role (one where nothing is said), then wait for all of them."""
        self.start_server()
        for role in ROLES:
            for number in range(counts.get(role, 1)):
                self.start(f"{role}-{number}")
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until the server answers and every live instance has registered."""

        def all_here() -> bool:
            for process in self.processes():
                assert process.status is None, f"{process.name} ended:\n{process.output()[-3000:]}"
            return self.api.ready() and len(self.registered()) >= len(self.instances)

        until(all_here, "all processes being ready", every=0.2)

    def registered(self) -> dict[str, str]:
        """Work port's owner -> instance id, of the instances that the server knows as live."""
        owners = {port: name for name, port in self.work_ports.items()}
        found: dict[str, str] = {}
        for instance in self.api.info()["instances"]:
            port = int(instance["work_url"].rpartition(":")[2])
            if port in owners:
                found[owners[port]] = instance["instance"]
        return found

    def missed(self, instance: str, since: float, seconds: float) -> None:
        """Wait until the server has missed an instance: no later than so many seconds after ``since``, when the blow
        fell."""
        left = since + seconds - time.monotonic()
        until(lambda: instance not in self.registered().values(), f"{instance} being missed", left)

    def unready(self, role: str, since: float, seconds: float) -> str:
        """Wait, as `missed` does, until /ready is 503 for want of a role; the reasons."""

        def look() -> str:
            reasons = "; ".join(self.api.reasons()) if not self.api.ready() else ""
            return reasons if role in reasons else ""

        return until(look, f"/ready naming the {role}", since + seconds - time.monotonic())

    def catch_denoiser(self, job: str, step: int) -> str:
        """Wait until the job has done so many steps, and freeze the denoiser that it is with; the denoiser's name. It
        has more steps to do then."""

        def look() -> str | None:
            video = self.api.job(job)
            assert video["status"] not in ("failed", "completed"), f"{job} ended before step {step}: {pretty(video)}"
            if video["stage"] != "denoising_running" or video["step"] < step:
                return None
            names = {instance: name for name, instance in self.registered().items()}
            holders = [
                names[one["instance"]]
                for one in self.api.info()["instances"]
                if any((lease["request"], lease["role"]) == (job, "denoiser") for lease in one["leases"])
            ]
            return holders[0] if holders else None

        name = until(look, f"step {step} of {job}")
        self.instances[name].signal(signals.SIGSTOP)
        video = self.api.job(job)
        assert video["stage"] == "denoising_running", f"{job} was over before its denoiser was frozen: {pretty(video)}"
        return name

    def processes(self) -> list[Process]:
        """All processes that should run."""
        return [*([self.server] if self.server else []), *self.instances.values()]

    def close(self) -> None:
        """Stop everything; every process that lives must end by itself."""
        self.api.close()
        stop_all(self.processes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def instances_of(video: Mapping[str, Any], role: str) -> list[str]:
    """Ids of the instances that finished a stage of ``role`` for this job."""
    return [timing["instance"] for timing in video["timings"] if timing["role"] == role]


def pretty(value: Any) -> str:
    """For messages of failed assertions."""
    return json.dumps(value, indent=1)[:4000]
