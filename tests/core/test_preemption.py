"""Pause, resume, migration, and instances that leave in good order."""

from __future__ import annotations

from triptych.core.events import CancelRequest, InstanceExited, JobState, MigrateRequest, PauseRequest, ResumeRequest
from triptych.ids import ROLES, InstanceId, RequestId
from triptych.wire.messages import Cancel, Draining, DrainStatus, Goodbye, Keep, Lease, RunStage, Stopped

from .harness import Bench, manifest
from .test_safekeeping import kept, released, running

E, D, V = ROLES


def stopped(bench: Bench, name: str, lease: Lease, step: int) -> None:
    copy = manifest(f"c{step}", lease.request, name, life=bench.lives[name])
    bench.receive(Stopped(**bench._signed(name), lease=lease, checkpoint=copy, step=step, steps=10))


def draining(bench: Bench, name: str) -> bool:
    """The instance says that it wants to leave; whether it is still needed."""
    bench.receive(Draining(**bench._signed(name), seconds=30.0))
    (status,) = bench.sent(name, DrainStatus)
    return status.needed


def state(bench: Bench, request: RequestId) -> JobState:
    return bench.view(request).state


# -- pause ---------------------------------------------------------------------------------------------------------


def test_a_pause_takes_a_running_stage_back_between_two_steps_and_a_resume_goes_on_from_there() -> None:
    bench, request, lease = running("denoiser")
    bench.feed(PauseRequest(request=request))
    (cancel,) = bench.sent("denoiser", Cancel)
    assert (cancel.lease, cancel.keep) == (lease, True)
    assert state(bench, request) is JobState.DENOISING_RUNNING
    stopped(bench, "denoiser", lease, 4)
    view = bench.view(request)
    assert (view.state, view.step, view.paused, view.position) == (JobState.DENOISING_WAITING, 4, True, None)
    assert not bench.sent("denoiser", RunStage)
    bench.feed(ResumeRequest(request=request))
    run = bench.run("denoiser")
    assert run.resume is not None
    assert (run.resume.copy, run.lease.attempt) == ("c4", 2)
    assert not bench.view(request).paused


def test_a_paused_request_has_no_clocks_and_costs_no_attempt() -> None:
    bench, request, lease = running("denoiser")
    bench.wait(5.0)
    bench.feed(PauseRequest(request=request))
    stopped(bench, "denoiser", lease, 4)
    before = bench.view(request)
    bench.wait(2000.0)
    after = bench.router.view(request)
    assert after is not None
    assert (after.waiting_seconds, after.running_seconds) == (before.waiting_seconds, before.running_seconds)
    for _ in range(6):  # more often than a stage may fail
        bench.feed(ResumeRequest(request=request))
        lease = bench.run("denoiser").lease
        bench.started("denoiser", lease)
        bench.feed(PauseRequest(request=request))
        stopped(bench, "denoiser", lease, 4)
    assert bench.view(request).state is JobState.DENOISING_WAITING


def test_a_queued_request_is_paused_at_once_and_others_pass_it() -> None:
    bench = Bench()
    bench.pool()
    first, second, third = (bench.submit(name) for name in "abc")
    bench.feed(PauseRequest(request=second))
    assert bench.view(second).paused
    bench.started("encoder", Lease(first, E, 1))
    bench.staged("encoder", Lease(first, E, 1))
    assert bench.run("encoder").lease.request == third


def test_a_stage_without_steps_is_finished_before_the_pause() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.started("encoder", Lease(request, E, 1))
    bench.feed(PauseRequest(request=request))
    assert not bench.sent("encoder", Cancel)
    bench.staged("encoder", Lease(request, E, 1))
    assert state(bench, request) is JobState.DENOISING_WAITING
    assert not bench.sent("denoiser", RunStage)
    bench.feed(ResumeRequest(request=request))
    assert bench.run("denoiser").lease.request == request


def test_a_stage_that_ends_before_the_pause_reaches_it_pauses_the_request_after_it() -> None:
    bench, request, lease = running("denoiser")
    bench.feed(PauseRequest(request=request))
    bench.staged("denoiser", lease)
    assert (state(bench, request), bench.view(request).paused) == (JobState.DECODER_WAITING, True)
    bench.feed(ResumeRequest(request=request))
    bench.decode(request)
    assert state(bench, request) is JobState.DONE


def test_a_paused_request_can_be_cancelled_and_loses_its_checkpoint_then() -> None:
    bench, request, lease = running("denoiser")
    bench.feed(PauseRequest(request=request))
    stopped(bench, "denoiser", lease, 4)
    bench.feed(CancelRequest(request=request))
    assert state(bench, request) is JobState.CANCELLED
    assert "c4" in released(bench, "denoiser")


def test_a_paused_request_outlives_its_instances_and_goes_back_to_what_must_be_done() -> None:
    bench, request, lease = running("denoiser")
    bench.feed(PauseRequest(request=request))
    stopped(bench, "denoiser", lease, 4)
    for name in ("denoiser", "encoder"):
        bench.feed(InstanceExited(instance=InstanceId(name)))
    assert (state(bench, request), bench.view(request).paused) == (JobState.ENCODER_WAITING, True)
    bench.join("encoder", life=2)
    assert not bench.sent("encoder", RunStage)
    bench.feed(ResumeRequest(request=request))
    assert bench.run("encoder").lease.request == request


def test_a_lost_order_to_stop_is_given_again() -> None:
    bench, request, lease = running("denoiser")
    bench.feed(PauseRequest(request=request))
    bench.now += 0.5
    bench.beat("denoiser", (lease,))
    assert [cancel.keep for cancel in bench.sent("denoiser", Cancel)] == [True]


def test_pauses_of_unknown_paused_and_running_requests_change_nothing() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    assert not bench.feed(PauseRequest(request=RequestId("nobody")))
    assert not bench.feed(ResumeRequest(request=request))
    bench.feed(PauseRequest(request=request))
    assert not bench.feed(PauseRequest(request=request))


# -- migration -----------------------------------------------------------------------------------------------------


def test_a_migrated_request_goes_on_elsewhere() -> None:
    bench, request, lease = running("denoiser")
    bench.join("denoiser-2", D)
    bench.feed(MigrateRequest(request=request))
    stopped(bench, "denoiser", lease, 4)
    resume = bench.run("denoiser-2").resume
    assert resume is not None
    assert resume.copy == "c4"


def test_without_another_instance_a_request_stays() -> None:
    bench, request, _ = running("denoiser")
    assert not bench.feed(MigrateRequest(request=request))
    assert bench.router.immovable(request) == "no other denoiser than denoiser can take it"


def test_a_request_can_be_moved_back() -> None:
    bench, request, lease = running("denoiser")
    bench.join("denoiser-2", D)
    for here, there, step in (("denoiser", "denoiser-2", 4), ("denoiser-2", "denoiser", 6)):
        bench.feed(MigrateRequest(request=request))
        stopped(bench, here, lease, step)
        lease = bench.run(there).lease
        bench.started(there, lease)
    assert state(bench, request) is JobState.DENOISING_RUNNING


def test_a_moved_request_returns_when_the_other_instance_is_lost() -> None:
    bench, request, lease = running("denoiser")
    bench.join("denoiser-2", D)
    bench.feed(MigrateRequest(request=request))
    bench.feed(InstanceExited(instance=InstanceId("denoiser-2")))
    stopped(bench, "denoiser", lease, 4)
    assert bench.run("denoiser").resume is not None


def test_a_request_moves_once_the_other_instance_has_room() -> None:
    bench, request, lease = running("denoiser")
    other = bench.submit("s")
    bench.join("denoiser-2", D)
    bench.encode(other)
    bench.feed(MigrateRequest(request=request))
    stopped(bench, "denoiser", lease, 4)
    assert not bench.sent("denoiser", RunStage)
    bench.denoise(other, "denoiser-2")
    assert bench.run("denoiser-2").lease.request == request


def test_why_a_request_cannot_be_moved_is_said() -> None:
    bench, request, _ = running("denoiser")
    bench.join("denoiser-2", D)
    assert bench.router.immovable(request) is None
    draining(bench, "denoiser-2")
    assert bench.router.immovable(request) == "no other denoiser than denoiser can take it"
    bench.feed(PauseRequest(request=request))
    assert bench.router.immovable(request) == "it is paused"
    waiting = bench.submit("s")
    assert bench.router.immovable(waiting) == "no denoiser has it now: it is encoder_waiting"
    assert bench.router.immovable(RequestId("nobody")) == "it has ended"


# -- leaving -------------------------------------------------------------------------------------------------------


def test_a_leaving_instance_gets_nothing_new_and_goes_once_its_work_is_handed_over() -> None:
    bench, request, lease = running("denoiser")
    bench.join("denoiser-2", D, slots=3)
    assert draining(bench, "denoiser")
    assert not bench.sent("denoiser", Cancel)  # it may finish what runs
    for name in ("s", "t"):
        bench.encode(bench.submit(name))
        assert bench.run("denoiser-2").lease.request == name
    stopped(bench, "denoiser", lease, 4)
    run = bench.run("denoiser-2")
    assert run.resume is not None
    assert run.resume.copy == "c4"
    assert draining(bench, "denoiser")  # until the checkpoint has been pulled
    (keep,) = [k for name in ("encoder", "decoder", "denoiser-2") for k in bench.sent(name, Keep)] or [None]
    assert keep is None
    bench.fetched("denoiser-2", run.lease)
    kept(bench, "encoder", Keep(server_epoch=bench.router._ledger.server_epoch, epoch=bench._signed("encoder")["epoch"],
                                manifest=run.resume, spare=True))  # fmt: skip
    assert not draining(bench, "denoiser")
    bench.receive(Goodbye(**bench._signed("denoiser"), reason="SIGTERM"))
    assert not bench.counted("requeued")
    assert state(bench, request) is JobState.DENOISING_WAITING


def test_what_has_not_begun_on_a_leaving_instance_goes_elsewhere_at_once() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.join("encoder-2", E)
    assert not draining(bench, "encoder")
    assert [cancel.keep for cancel in bench.sent("encoder", Cancel)] == [False]
    assert bench.run("encoder-2").lease == Lease(request, E, 2)


def test_what_a_leaving_encoder_made_moves_to_one_that_stays() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    bench.encode(request)
    assert draining(bench, "encoder")
    (keep,) = bench.sent("decoder", Keep)
    assert not keep.spare
    mine = kept(bench, "decoder", keep)
    assert not draining(bench, "encoder")
    bench.receive(Goodbye(**bench._signed("encoder"), reason="SIGTERM"))
    bench.join("denoiser", life=2)
    assert [copy.copy for copy in bench.run("denoiser").inputs] == [mine]
    bench.denoise(request)
    bench.decode(request)
    assert bench.view(request).attempt == 1


def test_what_a_paused_request_left_is_handed_over_if_it_can_be_and_not_waited_for_else() -> None:
    """Symptom: the last instance stayed for its whole time because of requests that nobody would go on with."""
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    bench.encode(request)
    bench.feed(PauseRequest(request=request))
    assert draining(bench, "encoder")
    (keep,) = bench.sent("decoder", Keep)
    kept(bench, "decoder", keep)
    assert not draining(bench, "encoder")
    bench.receive(Goodbye(**bench._signed("encoder"), reason="SIGTERM"))
    assert not draining(bench, "decoder"), "nobody is left to keep it"
    bench.receive(Goodbye(**bench._signed("decoder"), reason="SIGTERM"))
    for name in ("encoder", "denoiser", "decoder"):
        bench.join(name, life=2)
    bench.feed(ResumeRequest(request=request))
    assert bench.run("encoder").lease == Lease(request, E, 2), "it is computed again"


def test_an_idle_instance_is_not_needed() -> None:
    bench = Bench()
    bench.pool()
    assert not draining(bench, "denoiser")
    assert bench.router.missing_roles() == {D: "denoiser: asked to stop"}


def test_a_stage_that_a_leaving_instance_gave_up_is_nobodys_fault() -> None:
    bench, request, lease = running("denoiser")
    draining(bench, "denoiser")
    bench.stopped("denoiser", lease)
    assert state(bench, request) is JobState.DENOISING_WAITING
    job = bench.router._ledger.jobs[request]
    assert not job.faults
