"""Role processes that die, and frames that no peer of ours would send."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.e2e.harness import (
    DEATH_SECONDS,
    ROLES,
    SILENCE_SECONDS,
    SURELY_HEARD,
    Deployment,
    instances_of,
    pretty,
    until,
)

STAGES = {"encoder": "encoder", "denoiser": "denoising", "decoder": "decoder"}
"""Role to the first word of the states that a request is in at that role."""

EVIL_FRAMES: tuple[list[bytes], ...] = (
    [b""],
    [b"\x00" * 100],
    [b"{}", b'{"type": "hello"}'],
    [msgspec.msgpack.encode({"type": "hello"})],
    [msgspec.msgpack.encode({"type": "run_stage", "lease": ["a", "encoder", 1]})],
    [msgspec.msgpack.encode({"type": "no_such_message"})],
    [msgspec.msgpack.encode([[[[[[[[1]]]]]]]])],
    [b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os."],  # how a pickle begins
    [b"x"] * 64,
    [b"\xdf\xff\xff\xff\xff"],  # a map that claims four billion entries
)


def jobs_with_frozen(pool: Deployment, role: str) -> tuple[list[str], float]:
    """Two jobs that are with the instances of a role, which are all frozen, so that the jobs are still there when one
    dies. On a slow machine the jobs may take longer to get there than the server bears the silence: then once more.
    With the time at which they were frozen."""
    mine = [name for name in pool.instances if name.startswith(role)]
    ids = pool.registered()
    for _ in range(5):
        frozen = time.monotonic()
        for name in mine:
            pool.instances[name].signal(signal.SIGSTOP)
        jobs = [pool.api.submit(seed=seed) for seed in (1, 2)]
        until(
            lambda jobs=jobs: all(pool.api.job(job)["stage"].startswith(STAGES[role]) for job in jobs),
            f"the requests being with the {role}s",
        )
        if all(pool.registered().get(name) == ids[name] for name in mine):
            return jobs, frozen
        for name in mine:
            pool.instances[name].signal(signal.SIGCONT)
        for job in jobs:
            pool.api.done(job)
        pool.wait_ready()
    pytest.fail(f"in five tries no two jobs reached a frozen {role} before the server missed it")


@pytest.mark.parametrize("role", ROLES)
def test_work_of_a_killed_instance_is_done_by_another(pool: Deployment, role: str) -> None:
    """Symptom elsewhere: requests on a dead worker wait for their timeout, and new ones are still sent to it."""
    expected = [pool.api.make(seed=seed) for seed in (1, 2)]
    victim, *others = [name for name in pool.instances if name.startswith(role)]
    ids = pool.registered()
    jobs, frozen = jobs_with_frozen(pool, role)
    assert pool.server is not None
    told = len(pool.server.output())
    pool.instances[victim].kill()
    struck = time.monotonic()
    for name in others:
        pool.instances[name].signal(signal.SIGCONT)
    pool.missed(ids[victim], struck, DEATH_SECONDS)
    took = time.monotonic() - frozen
    videos = [pool.api.done(job) for job in jobs]
    assert [pool.api.content(job) for job in jobs] == expected
    assert all(ids[victim] not in instances_of(video, role) for video in videos), pretty(videos)
    if took < SURELY_HEARD:  # not by its silence, which takes seconds
        words = pool.server.output()[told:]
        assert re.search(rf"instance_lost: .*nobody listens at .*{re.escape(ids[victim])}", words), words[-3000:]
    pool.start(victim)
    pool.wait_ready()


LENGTHY = {"num_inference_steps": 60, "size": "128x128", "num_frames": 9, "seed": 3}


@pytest.fixture(scope="module")
def expected(pool: Deployment) -> bytes:
    """What a lengthy request makes when nobody disturbs it."""
    return pool.api.make(**LENGTHY)


def lengthy(pool: Deployment) -> tuple[str, str, str, float]:
    """Submit a lengthy request, and freeze its denoiser after the third step: the job, the name of the denoiser, that
    one's id, and when it was frozen."""
    ids = pool.registered()
    job = pool.api.submit(**LENGTHY)
    victim = pool.catch_denoiser(job, 3)
    return job, victim, ids[victim], time.monotonic()


def test_a_denoiser_killed_between_two_steps_costs_nothing_but_time(pool: Deployment, expected: bytes) -> None:
    job, victim, busy, _ = lengthy(pool)
    pool.instances[victim].kill()
    video = pool.api.done(job)
    assert video["attempt"] >= 2
    assert busy not in instances_of(video, "denoiser")
    assert pool.api.content(job) == expected
    pool.start(victim)
    pool.wait_ready()


def test_a_denoiser_that_wakes_when_its_work_is_done_elsewhere_is_not_believed(
    pool: Deployment, expected: bytes
) -> None:
    """Symptom elsewhere: a late result is taken for that of the attempt which followed, or its slot is lost."""

    def late() -> float:
        pattern = r'^triptych_events_total\{name="(?:late_report|stale_message)"\} (\S+)$'
        return sum(map(float, re.findall(pattern, pool.api.metrics(), re.MULTILINE)))

    job, victim, busy, struck = lengthy(pool)
    pool.missed(busy, struck, SILENCE_SECONDS)
    video = pool.api.done(job)
    assert video["attempt"] >= 2
    assert busy not in instances_of(video, "denoiser")
    before = late()
    pool.instances[victim].signal(signal.SIGCONT)
    until(lambda: late() > before, "a word of the stage that was taken from it")
    until(lambda: pool.registered().get(victim) == busy, "its return")
    assert pool.api.job(job) == video
    assert pool.api.content(job) == expected
    until(lambda: not any(i["leases"] or i["copies"] for i in pool.api.info()["instances"]), "its slot being free")


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory):
    """One instance of each role, and a queue timeout of few seconds."""
    with Deployment(tmp_path_factory.mktemp("impatient"), queue_timeout=6) as deployment:
        yield deployment.start_all()


@pytest.mark.parametrize("role", ROLES)
def test_without_another_instance_the_request_fails_in_time_and_names_the_role(
    impatient: Deployment, role: str
) -> None:
    name = f"{role}-0"
    frozen = time.monotonic()
    impatient.instances[name].signal(signal.SIGSTOP)
    job = impatient.api.submit()
    until(lambda: impatient.api.job(job)["stage"].startswith(STAGES[role]), f"the request being with the {role}")
    with impatient.api.healthy():
        impatient.instances.pop(name).kill()
        reasons = impatient.unready(role, time.monotonic(), DEATH_SECONDS)
        assert "process exited" in reasons or time.monotonic() - frozen > SURELY_HEARD, reasons
        video = impatient.api.ended(job, seconds=30)
    assert video["status"] == "failed"
    assert role in video["error"]["message"]
    assert "queue" in video["error"]["message"] or "wait" in video["error"]["message"]
    impatient.start(name)
    impatient.wait_ready()
    impatient.api.make()


@pytest.mark.parametrize("role", ROLES)
def test_health_and_readiness_tell_the_truth_while_the_only_one_of_a_role_is_frozen_and_when_it_has_left(
    impatient: Deployment, role: str
) -> None:
    name = f"{role}-0"
    process = impatient.instances[name]
    frozen = impatient.registered()[name]
    with impatient.api.healthy():
        process.signal(signal.SIGSTOP)
        struck = time.monotonic()
        impatient.missed(frozen, struck, SILENCE_SECONDS)
        impatient.unready(role, struck, SILENCE_SECONDS)
        process.signal(signal.SIGCONT)
        until(impatient.api.ready, "its return")
        assert process.stop() == 0, process.output()[-3000:]
        impatient.unready(role, time.monotonic(), DEATH_SECONDS)
        impatient.start(name)
        impatient.wait_ready()


def test_malformed_frames_on_every_socket_are_survived(impatient: Deployment) -> None:
    """Symptom elsewhere: one malformed message ends the router's thread, and every later request hangs."""
    pushed = [impatient.frontend + 1, impatient.frontend + 2, impatient.frontend + 3, *impatient.work_ports.values()]
    with zmq.Context() as context:
        for port, kind in [(impatient.frontend, zmq.DEALER), *((port, zmq.PUSH) for port in pushed)]:
            with context.socket(kind) as socket:
                socket.setsockopt(zmq.LINGER, 5000)
                socket.connect(f"tcp://127.0.0.1:{port}")
                for frames in EVIL_FRAMES:
                    socket.send_multipart(frames)
    impatient.api.make()
    assert all(process.status is None for process in impatient.processes())


def test_rubbish_that_is_not_zmq_at_all_is_survived(impatient: Deployment, folder: Path) -> None:
    import socket

    for port in [*range(impatient.frontend, impatient.frontend + 4), *impatient.work_ports.values()]:
        with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 64)  # as much of it as is listened to
    impatient.api.make()
    assert all(process.status is None for process in impatient.processes())
