"""A real server process, killed without warning: what it accepted goes on in the next one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import asking
from tests.e2e.harness import Api, Process, until
from tests.server.disk import on_disk
from tests.server.house import Puppet
from triptych.errors import StorageFailed
from triptych.ids import ROLES, RequestId, Role
from triptych.launch.ports import free_ports

ENCODER, DENOISER, DECODER = ROLES


class Town:
    """A server process that can be killed and started again, and puppets in this process that outlive it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.frontend, *_ = free_ports(5)
        self.api = Api(f"http://127.0.0.1:{self.port}")
        self.puppets: list[Puppet] = []
        self.server = self.start()

    def start(self) -> Process:
        """Start the server on the same state and ports."""
        self.server = Process(
            "server",
            ["serve", "--disagg-role", "server", "--port", str(self.port), "--scheduler-port", str(self.frontend),
             "--output-dir", str(self.folder / "outputs"), "--state-dir", str(self.folder / "state")],
            self.folder,
        )  # fmt: skip
        return self.server

    def add(self, *roles: Role, slots: int = 2, hold: bool = False) -> Puppet:
        (port,) = free_ports(1)
        puppet = Puppet(server_port=self.frontend, port=port, roles=roles, slots=slots, media=b"film")
        puppet.hold = frozenset(roles if hold else ())
        self.puppets.append(puppet)
        return puppet

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.server.status is None, self.server.output()[-3000:]
            return self.api.ready() and len(self.api.info()["instances"]) == len(self.puppets)

        until(ready, "the server being ready with all instances")

    def submit(self, prompt: str, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return asking.post(f"{self.api.url}/v1/videos", json={"prompt": prompt}, headers=headers, trust_env=False)

    def state(self, job: str) -> str:
        return self.api.job(job)["stage"]

    def reach(self, job: str, state: str) -> None:
        until(lambda: self.state(job) == state, f"{job} {state}")

    def written(self, job: str, *, done: int, held: bool) -> None:
        """Wait until a kill would lose nothing of how far the job is: so many stages done, and one with an instance or
        not. What changed hands in the very last moments before a kill may be done again, by design."""

        def on_the_disk() -> bool:
            try:
                history, *_ = on_disk(self.folder / "state")[RequestId(job)]
            except StorageFailed:  # copied while the server wrote
                return False
            return len(history.done) == done and (history.holder is not None) == held

        until(on_the_disk, f"{job} being in the journal with {done} stages done", every=0.05)

    def done(self, job: str) -> dict[str, Any]:
        return self.api.done(job)

    def executions(self) -> Counter[tuple[str, str]]:
        """How often each stage of each job was begun, anywhere."""
        return Counter((lease.request, lease.role.value) for p in self.puppets for lease, _, _ in tuple(p.seen))


class Pollers:
    """Clients who ask for their jobs all the time, one after the other, whatever happens to the server."""

    def __init__(self, town: Town) -> None:
        self.jobs: list[str] = []
        self.answers: Counter[int | str] = Counter()
        """How often each status came; what is no answer, by the kind of its error."""
        self._town = town
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="pollers")

    def _ask(self) -> None:
        with httpx.Client(base_url=self._town.api.url, timeout=60, trust_env=False) as http:
            while not self._over.wait(0.01):
                for job in tuple(self.jobs):
                    try:
                        answer = http.get(f"/v1/videos/{job}")
                    except httpx.TransportError as error:
                        self.answers[type(error).__name__] += 1
                    else:
                        self.answers[answer.status_code] += 1

    def __enter__(self) -> Pollers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    for puppet in town.puppets:
        puppet.crash()
    town.api.close()
    town.server.kill()


def test_every_accepted_job_survives_the_kill_and_running_stages_are_not_repeated(town: Town) -> None:
    town.add(ENCODER)
    denoiser = town.add(DENOISER, slots=2)
    town.add(DECODER)
    town.wait_ready()
    finished = town.submit("finished", key="first").json()["id"]
    town.done(finished)
    denoiser.hold = frozenset({DENOISER})
    running = [town.submit(f"running {i}", key=f"running {i}").json()["id"] for i in range(2)]
    for job in running:
        town.reach(job, "denoising_running")
    waiting = [town.submit(f"waiting {i}").json()["id"] for i in range(5)]
    for job in waiting:
        town.reach(job, "denoising_waiting")
    for job in running:
        town.written(job, done=1, held=True)
    for job in waiting:
        town.written(job, done=1, held=False)

    town.server.kill()
    with pytest.raises(httpx.TransportError):
        town.api.job(finished)
    town.start()
    town.wait_ready()

    assert town.api.job(finished)["status"] == "completed"
    assert town.api.content(finished) == b"film"
    for job in running:
        town.reach(job, "denoising_running")
    again = town.submit("running 0", key="running 0")
    assert (again.status_code, again.json()["id"]) == (200, running[0])
    other = town.submit("something else", key="first")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert [lease.request for lease in denoiser.held] == running
    denoiser.let_go()
    for job in (*running, *waiting):
        assert town.done(job)["status"] == "completed"
        assert town.api.content(job) == b"film"
    jobs = [finished, *running, *waiting]
    assert town.executions() == {(job, role.value): 1 for job in jobs for role in ROLES}
    begun = [lease.request for lease, _, _ in denoiser.seen]
    assert begun == jobs, "waiting jobs are taken up in the order of their acceptance"


def test_who_polls_sees_no_gap_but_refused_connections(town: Town) -> None:
    town.add(ENCODER)
    denoiser = town.add(DENOISER, hold=True)
    town.add(DECODER)
    with Pollers(town) as pollers:
        for life in range(3):
            town.wait_ready()
            job = town.submit(f"in life {life}").json()["id"]
            pollers.jobs.append(job)
            until(lambda job=job: town.state(job).startswith("denoising"), f"{job} being with the denoiser")
            until(lambda seen=pollers.answers[200]: pollers.answers[200] > seen, "an answer before the kill")
            town.server.kill()
            until(lambda seen=pollers.answers["ConnectError"]: pollers.answers["ConnectError"] > seen, "no answer")
            town.start()
            until(lambda seen=pollers.answers[200]: pollers.answers[200] > seen, "an answer after the kill")
        # A stage may be given out once more, where a busy machine kept its instance from coming back in time.
        until(lambda: len({lease.request for lease in denoiser.held}) >= 2, "two jobs being held")
        denoiser.let_go()
        for job in pollers.jobs:
            town.done(job)
    assert {answer for answer in pollers.answers if isinstance(answer, int)} == {200}, pollers.answers


def test_a_kill_right_after_the_answer_takes_no_job(town: Town) -> None:
    town.add(*ROLES)
    jobs: list[str] = []
    for life in range(3):
        town.wait_ready()
        answer = town.submit(f"in life {life}")
        town.server.kill()
        assert answer.status_code == 200, answer.text
        jobs.append(answer.json()["id"])
        town.start()
    town.wait_ready()
    for job in jobs:
        town.done(job)
        assert town.api.content(job) == b"film"


def test_stages_that_end_while_the_server_is_down_count(town: Town) -> None:
    puppets = {role: town.add(role, hold=True) for role in ROLES}
    town.wait_ready()
    jobs: dict[Role, str] = {}
    for last in reversed(ROLES):  # one job is held in each stage
        job = jobs[last] = town.submit(f"until {last}").json()["id"]
        for role in ROLES[: ROLES.index(last)]:
            until(lambda role=role: puppets[role].held, f"{job} in the {role}")
            puppets[role].let_go()
            puppets[role].hold = frozenset({role})
        until(lambda last=last: puppets[last].held, f"{job} in the {last}")
        puppets[last].held, kept = [], puppets[last].held
        jobs[last] = job
        puppets[last].kept = kept  # type: ignore[attr-defined]
    for role, job in jobs.items():
        town.reach(job, f"{'denoising' if role is DENOISER else role.value}_running")
        town.written(job, done=ROLES.index(role), held=True)
    town.server.kill()
    for puppet in puppets.values():
        puppet.held = puppet.kept  # type: ignore[attr-defined]
        puppet.let_go()
    town.start()
    town.wait_ready()
    for job in jobs.values():
        town.done(job)
        assert town.api.content(job) == b"film"
    assert set(town.executions().values()) == {1}
    assert len(town.executions()) == 9


def test_a_job_whose_instance_does_not_come_back_is_given_to_another(town: Town) -> None:
    town.add(ENCODER, DECODER)
    gone = town.add(DENOISER, hold=True)
    town.wait_ready()
    job = town.submit("a tree").json()["id"]
    town.reach(job, "denoising_running")
    town.written(job, done=1, held=True)
    town.server.kill()
    gone.crash()
    town.puppets.remove(gone)
    town.add(DENOISER)
    town.start()
    town.wait_ready()
    video = town.done(job)
    assert [timing["role"] for timing in video["timings"]] == list(ROLES)
    assert video["timings"][1]["instance"] != gone.instance
    assert town.executions()[job, "encoder"] == 1, "the encoder's output was still there"
