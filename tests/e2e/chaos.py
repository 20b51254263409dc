"""Blows that fall on one process of a deployment while a request is in a certain state, and how to bring them about."""

from __future__ import annotations

import itertools
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tests import asking
from tests.e2e.harness import ROLES, Deployment, Process, until
from triptych.config import METRICS_OFFSET

STATES = {
    "encoder_waiting": "encoder",
    "encoder_running": "encoder",
    "denoising_waiting": "denoiser",
    "denoising_running": "denoiser",
    "decoder_waiting": "decoder",
    "decoder_running": "decoder",
}
"""Every state in which a request spends time, and the role whose instance it is with then."""

VICTIMS = (*ROLES, "server")
BLOWS = ("kill", "freeze", "stop")
"""SIGKILL; SIGSTOP for longer than a lease lasts; SIGTERM. What ended is started again at once."""

PLANES = ("shm", "mooncake")

FREEZE = 3.5
"""Seconds: an instance is given up after 2.5 s of silence."""

REQUEST: dict[str, Any] = {"size": "64x64", "num_frames": 9, "num_inference_steps": 6}
SEEDS = 3
TRIES = 200
"""Requests that are submitted at the most to catch one in a certain state: while it encodes, one in five is caught, on
a machine with far more to do than it can one in ten."""
SLICE = 0.001
"""Seconds for which an encoder is let go at a time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is done to whom, when, and over which plane the tensors travel."""

    victim: str
    state: str
    blow: str
    plane: str

    def __str__(self) -> str:
        return f"{self.plane}-{self.victim}-{self.blow}-{self.state}"


def all_cases() -> list[Case]:
    """Every victim, state and blow; the planes take turns."""
    table = itertools.product(VICTIMS, STATES, BLOWS)
    return [
        Case(victim=victim, state=state, blow=blow, plane=PLANES[number % 2])
        for number, (victim, state, blow) in enumerate(table)
    ]


class Arena:
    """A deployment of one instance of each role, reused from case to case."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.expected = [deployment.api.make(seed=seed, **REQUEST) for seed in range(SEEDS)]
        self._number = 0

    def strike(self, case: Case) -> list[tuple[str, int]]:
        """Bring a request into the state of the case, let the blow fall, and mend what it broke.

        Returns the requests that were accepted before and during the blow, each with its seed.
        """
        jobs = [self._submit(), *self.catch(case.state)]
        self._blow(case)
        return jobs

    def catch(self, state: str) -> list[tuple[str, int]]:
        """Bring a request into a state, and leave the instance that it is with stopped. Fails when none can be caught.

        Returns the requests that were accepted meanwhile, each with its seed; the last one is in that state.
        """
        jobs: list[tuple[str, int]] = []
        holder = self.holder(state)
        for tries in itertools.count(1):
            if state.endswith("waiting"):
                holder.signal(signal.SIGSTOP)
                jobs.append(self._submit())
            elif state == "encoder_running":
                holder.signal(signal.SIGSTOP)
                jobs.append(self._submit())
                self._inch(jobs[-1][0], holder)
            else:
                jobs.append(self._submit())
                self._await(jobs[-1][0], state)
                holder.signal(signal.SIGSTOP)
            if self._stays(jobs[-1][0], state):
                return jobs
            assert tries < TRIES, f"no request stayed in {state}, the last one is {self._stage(jobs[-1][0])}"
            holder.signal(signal.SIGCONT)
        raise AssertionError

    def holder(self, state: str) -> Process:
        """The instance that a request is with in a state."""
        return self.deployment.instances[f"{STATES[state]}-0"]

    def settle(self, jobs: list[tuple[str, int]]) -> None:
        """Wait for the good end of every request, and compare its bytes with those of an undisturbed run."""
        api = self.deployment.api
        for job, seed in jobs:
            api.done(job)
            assert api.content(job) == self.expected[seed], f"{job} has other bytes than an undisturbed run"

    def at_rest(self) -> bool:
        """Whether nothing is held for any request: no lease, no copy, and no memory of a transfer pool."""
        instances = self.deployment.api.info()["instances"]
        held = any(one["leases"] or one["copies"] or one["pool_used"] for one in instances)
        return len(instances) == len(ROLES) and not held

    def steps(self) -> float:
        """Denoising steps that the denoiser has computed since it was started."""
        port = self.deployment.work_ports["denoiser-0"] + METRICS_OFFSET
        text = asking.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).raise_for_status().text
        (value,) = re.findall(r"^triptych_instance_steps_total (\S+)$", text, re.M)
        return float(value)

    def _submit(self) -> tuple[str, int]:
        self._number += 1
        seed = self._number % SEEDS
        return self.deployment.api.submit(seed=seed, **REQUEST), seed

    def _stage(self, job: str) -> str:
        return self.deployment.api.job(job)["stage"]

    def _await(self, job: str, state: str) -> None:
        order = [*STATES, "done"]
        deadline = time.monotonic() + 60
        while (stage := self._stage(job)) not in order or order.index(stage) < order.index(state):
            assert stage in order, f"{job} ended before it came to {state}: {self.deployment.api.job(job)}"
            assert time.monotonic() < deadline, f"{job} is in {stage} after 60 s and never came to {state}"

    def _stays(self, job: str, state: str) -> bool:
        """Whether a request is in a state with its holder stopped, when all that was under way has arrived."""
        self._await(job, state)
        time.sleep(0.1)  # not for readiness: words that the holder has sent before it was stopped
        return self._stage(job) == state

    def _inch(self, job: str, holder: Process) -> None:
        """Let a stopped encoder go on by the millisecond until it has begun with a request: it is done in a few."""
        self._await(job, "encoder_waiting")
        deadline = time.monotonic() + 60
        while self._stage(job) == "encoder_waiting":
            assert time.monotonic() < deadline, f"{job} never began"
            holder.signal(signal.SIGCONT)
            time.sleep(SLICE)
            holder.signal(signal.SIGSTOP)
            time.sleep(0.02)  # for its words to arrive

    def _blow(self, case: Case) -> None:
        deployment = self.deployment
        name = "server" if case.victim == "server" else f"{case.victim}-0"
        process = deployment.server if name == "server" else deployment.instances[name]
        assert process is not None
        holder = self.holder(case.state)
        match case.blow:
            case "kill":
                process.kill()
            case "freeze":
                process.signal(signal.SIGSTOP)
                time.sleep(FREEZE)
            case _:
                holder.signal(signal.SIGCONT)
                assert process.stop() == 0, process.output()[-3000:]
        if process.status is None:
            process.signal(signal.SIGCONT)
        elif name == "server":
            deployment.start_server()
        else:
            deployment.start(name)
        if holder.status is None:
            holder.signal(signal.SIGCONT)
        until(self._answers, "the server answering again")
        deployment.wait_ready()

    def _answers(self) -> bool:
        try:
            return bool(self.deployment.api.info())
        except httpx.TransportError:
            return False
