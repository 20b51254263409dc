from __future__ import annotations

from triptych.core.events import InstanceExited, JobState, Update
from triptych.ids import ROLES, InstanceId, RequestId, Role
from triptych.wire.messages import Ack, Cancel, ErrorInfo, Lease, Release

from .harness import Bench

E, D, V = ROLES


def lease(request: RequestId, role: Role, attempt: int = 1) -> Lease:
    return Lease(request, role, attempt)


def error_of(bench: Bench, request: RequestId) -> ErrorInfo:
    view = bench.view(request)
    assert view.state is JobState.TIMED_OUT
    assert view.error is not None
    return view.error


def test_waiting_for_a_role_that_nobody_serves_says_so() -> None:
    bench = Bench()
    request = bench.submit("r", queue_timeout=5.0)
    bench.wait(5.0)
    error = error_of(bench, request)
    assert error.code == "queue_timeout"
    assert error.message == (
        "queue timeout: 5.0 s of waiting were used up (limit 5 s) in encoder_waiting; "
        "no live encoder instance: none has joined"
    )


def test_the_reason_names_how_the_last_instance_of_the_role_was_lost() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r", queue_timeout=5.0)
    bench.encode(request)
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    bench.wait(5.0)
    error = error_of(bench, request)
    assert "in denoising_waiting; no live denoiser instance: the last one was denoiser: process exited" in error.message
    assert bench.sent("encoder", Release), "what was kept for the denoiser is freed"


def test_waiting_behind_others_says_how_many() -> None:
    bench = Bench()
    bench.join("encoder")
    bench.submit("a")
    bench.submit("b")
    request = bench.submit("r", queue_timeout=5.0)
    bench.wait(5.0)
    assert "1 encoder instance(s) live, 1 request(s) before this one" in error_of(bench, request).message


def test_a_lease_that_is_never_taken_up_counts_as_waiting_and_is_stopped() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r", queue_timeout=5.0)
    bench.wait(5.0)
    assert "leased to encoder, which has not started it" in error_of(bench, request).message
    assert [cancel.lease for cancel in bench.sent("encoder", Cancel)] == [lease(request, E)]


def test_running_time_is_summed_over_stages_and_attempts() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r", run_timeout=10.0)
    bench.started("encoder", lease(request, E))
    bench.wait(4.0)
    bench.failed("encoder", lease(request, E))
    bench.wait(60.0)
    bench.started("encoder", lease(request, E, 2))
    bench.wait(4.0)
    bench.staged("encoder", lease(request, E, 2))
    bench.started("denoiser", lease(request, D, 2))
    bench.wait(1.9)
    assert bench.view(request).state is JobState.DENOISING_RUNNING
    bench.wait(0.2)
    error = error_of(bench, request)
    assert error.code == "run_timeout"
    assert "(limit 10 s) in denoising_running on denoiser, attempt 2" in error.message
    assert [cancel.lease for cancel in bench.sent("denoiser", Cancel)] == [lease(request, D, 2)]
    assert bench.copies_at("encoder") == []


def test_waiting_time_is_summed_over_stages_and_running_time_is_not_waiting() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r", queue_timeout=10.0)
    bench.wait(6.0)
    bench.started("encoder", lease(request, E))
    bench.wait(100.0)
    bench.staged("encoder", lease(request, E))
    bench.wait(3.9)
    assert bench.view(request).state is JobState.DENOISING_WAITING
    bench.wait(0.2)
    assert "in denoising_waiting" in error_of(bench, request).message


def test_the_next_tick_is_due_when_the_next_thing_can_happen() -> None:
    bench = Bench(lease_timeout=2.5)
    assert bench.router.next_deadline(bench.now) == bench.now + 1.0
    bench.submit("r", queue_timeout=0.25)
    assert bench.router.next_deadline(bench.now) == bench.now + 0.25


def test_a_timeout_ends_a_request_exactly_once() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r", queue_timeout=1.0)
    bench.wait(1.0)
    bench.staged("encoder", lease(request, E))
    assert bench.sent("encoder", Ack)
    assert not bench.all(Update)
    bench.wait(5.0)
    assert bench.states(request).count("timed_out") == 1
