"""What is foretold of waiting, running and new requests."""

from __future__ import annotations

import pytest

from triptych.core.events import PauseRequest
from triptych.ids import ROLES, RequestId, Role
from triptych.wire.messages import Finished, Lease, Staged

from .harness import FILE, Bench, Output, manifest

E, D, V = ROLES
SECONDS = {E: 1.0, D: 10.0, V: 2.0}


def finish_stage(bench: Bench, name: str, request: str, role: Role, attempt: int = 1) -> None:
    """Let a stage end that took what stages of its role take."""
    lease = Lease(RequestId(request), role, attempt)
    bench.started(name, lease)
    if role is V:
        bench.receive(
            Finished(**bench._signed(name), lease=lease, files=(FILE,), compute_seconds=2.0, encode_seconds=0.0)
        )
        bench.stored(lease)
        return
    made = Output(consumer=role.next or V, manifest=manifest(f"{request}/{role}", lease.request, name))
    bench.receive(
        Staged(**bench._signed(name), lease=lease, outputs=(made,), compute_seconds=SECONDS[role], stage_seconds=0.0)
    )


def taught(denoisers: int = 1) -> Bench:
    """A pool that has done one request."""
    bench = Bench(lease_timeout=1000.0)
    bench.join("encoder")
    for number in range(denoisers):
        bench.join(f"denoiser-{number}")
    bench.join("decoder")
    bench.submit("first")
    finish_stage(bench, "encoder", "first", E)
    finish_stage(bench, "denoiser-0", "first", D)
    finish_stage(bench, "decoder", "first", V)
    return bench


def encoded(bench: Bench, *names: str) -> None:
    """Accept requests and do their encoding."""
    for name in names:
        bench.submit(name)
        finish_stage(bench, "encoder", name, E)


def test_nothing_is_foretold_before_anything_was_done() -> None:
    bench = Bench()
    bench.pool()
    outlook = bench.router.outlook(bench.submit("r"))
    assert (outlook.starts_in, outlook.ends_in) == (None, None)
    assert bench.router.predicted_wait() is None


def test_an_idle_pool_makes_nobody_wait() -> None:
    assert taught().router.predicted_wait() == 0.0


def test_a_new_request_waits_for_the_work_of_the_slowest_role() -> None:
    bench = taught()
    encoded(bench, "a", "b", "c")
    assert bench.router.predicted_wait() == pytest.approx(30.0)


def test_twice_the_instances_halve_the_wait() -> None:
    bench = taught(denoisers=2)
    encoded(bench, "a", "b", "c", "d")
    assert bench.router.predicted_wait() == pytest.approx(20.0)


def test_every_accepted_request_counts_at_once() -> None:
    bench = taught()
    waits = []
    for number in range(5):
        waits.append(bench.router.predicted_wait())
        bench.submit(f"r{number}")
    assert waits == pytest.approx([0.0, 10.0, 20.0, 30.0, 40.0])


def test_stages_that_one_instance_serves_come_one_after_the_other() -> None:
    bench = Bench()
    bench.join("all", *ROLES)
    bench.submit("first")
    for role in ROLES:
        finish_stage(bench, "all", "first", role)
    bench.submit("r")
    assert bench.router.predicted_wait() == pytest.approx(13.0)


def test_a_waiting_request_is_told_when_it_starts_and_ends() -> None:
    bench = taught()
    encoded(bench, "a", "b", "c")
    outlook = bench.router.outlook(RequestId("c"))
    assert outlook.starts_in == pytest.approx(20.0)
    assert outlook.ends_in == pytest.approx(32.0)


def test_what_is_done_of_a_running_stage_is_not_waited_for_again() -> None:
    bench = taught()
    encoded(bench, "a", "b")
    bench.started("denoiser-0", Lease(RequestId("a"), D, 1))
    bench.now += 8.0
    bench.progress("denoiser-0", Lease(RequestId("a"), D, 1), step=4, steps=10)  # its own pace: 2 s a step
    assert bench.router.outlook(RequestId("a")).ends_in == pytest.approx(12.0 + 2.0)
    assert bench.router.outlook(RequestId("a")).starts_in is None
    assert bench.router.outlook(RequestId("b")).starts_in == pytest.approx(12.0)


def test_a_paused_request_is_in_nobodys_way_and_nothing_is_foretold_of_it() -> None:
    bench = taught()
    encoded(bench, "a", "b")
    bench.feed(PauseRequest(request=RequestId("b")))
    assert bench.router.outlook(RequestId("b")).ends_in is None
    assert bench.router.predicted_wait() == pytest.approx(10.0)


def test_without_an_instance_nobody_knows() -> None:
    bench = taught()
    bench.submit("r")
    bench.wait(1001.0, alive=False)
    assert bench.router.instances() == ()
    assert bench.router.predicted_wait() is None
    assert bench.router.outlook(RequestId("r")).starts_in is None
    assert bench.router.outlook(RequestId("ended or unknown")).ends_in is None
