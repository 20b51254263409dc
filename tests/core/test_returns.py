"""A restarted server goes on with what its instances bring back, and does once more only what is gone."""

from __future__ import annotations

from tests.core.harness import SERVER, Bench, manifest
from triptych.core.events import (
    CancelRequest,
    JobState,
    LeaseGranted,
    PauseRequest,
    Restore,
    ResumeRequest,
    StageDone,
    StageTiming,
)
from triptych.ids import ROLES, Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import Cancel, Lease, Output, Release, RunStage, Staged

E, D, V = ROLES
R = RequestId("r")
GRACE = 5.0


def lease(role: Role, attempt: int = 1) -> Lease:
    return Lease(R, role, attempt)


def done(role: Role, *consumers: Role, attempt: int = 1, life: int = 1) -> StageDone:
    """A stage as the journal has it; its copies are named after role, attempt and consumer."""
    outputs = tuple(
        Output(consumer=reader, manifest=manifest(f"{role}.{attempt}>{reader}", R, role, life=life))
        for reader in consumers
    )
    timing = StageTiming(
        role=role, instance=InstanceId(role), attempt=attempt, waiting=0.5, pulling=0.0, pulled_bytes=0, plane="",
        running=2.0, compute=2.0, staging=0.0,
    )  # fmt: skip
    made = lease(role, attempt)
    return StageDone(lease=made, instance=InstanceId(role), outputs=outputs, timing=timing, waited=0.5, ran=2.0)


def restore(*stages: StageDone, holder: str | None = None, **fields: float | int) -> Restore:
    return Restore(
        request=R,
        params={},
        queue_timeout=600.0,
        run_timeout=600.0,
        holder=None if holder is None else InstanceId(holder),
        done=stages,
        timings=tuple(stage.timing for stage in stages),
        **fields,  # type: ignore[arg-type]
    )


def copies(*stages: StageDone) -> tuple[object, ...]:
    return tuple(output.manifest for stage in stages for output in stage.outputs)


def test_a_request_that_had_not_begun_is_lined_up_at_once_in_the_order_of_acceptance() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.feed(Restore(request=RequestId(name), params={}, queue_timeout=9.0, run_timeout=9.0))
    assert [bench.view(RequestId(name)).position for name in ("a", "b")] == [0, 1]
    bench.join("encoder")
    assert bench.run("encoder").lease == Lease(RequestId("a"), E, 1)


def test_a_running_stage_goes_on_under_its_lease() -> None:
    bench = Bench()
    encoded = done(E, D)
    bench.feed(restore(encoded, holder="denoiser"))
    assert bench.view(R).state is JobState.DENOISING_WAITING
    bench.join("encoder", copies=copies(encoded))
    assert bench.sent("encoder", Release) == []
    bench.join("denoiser", leases=(lease(D),))
    assert bench.sent("denoiser", RunStage) == bench.sent("denoiser", Cancel) == []
    (granted,) = bench.all(LeaseGranted)
    assert (granted.lease, granted.instance) == (lease(D), "denoiser")
    bench.started("denoiser", lease(D))
    assert bench.view(R).state is JobState.DENOISING_RUNNING
    bench.staged("denoiser", lease(D))
    assert [release.copies for release in bench.sent("encoder", Release)] == [("encoder.1>denoiser",)]
    bench.join("decoder")
    assert bench.run("decoder").lease == lease(V)


def test_a_denoising_stage_of_a_paused_request_is_stopped_between_two_steps_when_it_comes_back() -> None:
    bench = Bench()
    encoded = done(E, D)
    bench.feed(restore(encoded, holder="denoiser"))
    bench.feed(PauseRequest(request=R))
    bench.join("encoder", copies=copies(encoded))
    bench.join("denoiser", leases=(lease(D),))
    assert [(cancel.lease, cancel.keep) for cancel in bench.sent("denoiser", Cancel)] == [(lease(D), True)]
    bench.started("denoiser", lease(D))
    bench.stopped("denoiser", lease(D))
    assert bench.sent("denoiser", RunStage) == []
    assert (bench.view(R).state, bench.view(R).paused) == (JobState.DENOISING_WAITING, True)
    bench.feed(ResumeRequest(request=R))
    assert bench.run("denoiser").lease == lease(D, 2)


def test_a_pause_that_comes_before_the_first_word_of_a_stage_that_went_on_does_not_throw_its_steps_away() -> None:
    bench = Bench()
    encoded = done(E, D)
    bench.feed(restore(encoded, holder="denoiser"))
    bench.join("encoder", copies=copies(encoded))
    bench.join("denoiser", leases=(lease(D),))
    bench.feed(PauseRequest(request=R))
    assert [cancel.keep for cancel in bench.sent("denoiser", Cancel)] == [True]


def test_clocks_and_timings_go_on_and_the_time_without_a_server_counts_for_nothing() -> None:
    bench = Bench()
    bench.feed(restore(done(E, D), waited=3.0, ran=2.0))
    bench.wait(1.0, alive=False)
    view = bench.router.view(R)
    assert view is not None
    assert (view.waiting_seconds, view.running_seconds) == (4.0, 2.0)
    assert [timing.role for timing in view.timings] == [E]


def test_an_outcome_that_was_sent_to_the_dead_server_counts_when_it_arrives_late() -> None:
    bench = Bench()
    bench.feed(restore(holder="encoder"))
    made = done(E, D)
    bench.join("encoder", leases=(lease(E),), copies=copies(made))
    assert bench.sent("encoder", Release) == [], "the outcome that names this copy is still to come"
    old = Staged(
        instance=InstanceId("encoder"), epoch=Epoch("encoder/1"), server_epoch=Epoch("an earlier life"),
        lease=lease(E), outputs=made.outputs, compute_seconds=1.0, stage_seconds=0.1,
    )  # fmt: skip
    bench.receive(old)
    assert bench.view(R).state is JobState.DENOISING_WAITING
    assert bench.copies_at("encoder") == ["encoder.1>denoiser"]


def test_such_an_outcome_of_a_lease_that_this_life_has_granted_is_not_believed() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.started("encoder", lease(E))
    made = done(E, D)
    old = Staged(
        instance=InstanceId("encoder"), epoch=Epoch("encoder/1"), server_epoch=Epoch("an earlier life"),
        lease=lease(E), outputs=made.outputs, compute_seconds=1.0, stage_seconds=0.1,
    )  # fmt: skip
    bench.receive(old)
    assert old.server_epoch != SERVER
    assert bench.view(request).state is JobState.ENCODER_RUNNING


def test_an_instance_that_comes_without_its_lease_has_the_stage_granted_anew_at_once() -> None:
    bench = Bench()
    encoded = done(E, D)
    bench.feed(restore(encoded, holder="denoiser"))
    bench.join("denoiser", life=2)
    assert bench.view(R).state is JobState.DENOISING_WAITING
    assert bench.sent("denoiser", RunStage) == []  # its input may still come back
    bench.join("encoder", copies=copies(encoded))
    run = bench.run("denoiser")
    assert run.lease == lease(D, 2)
    assert [m.copy for m in run.inputs] == ["encoder.1>denoiser"]


def test_another_instance_gets_the_stage_when_the_grace_is_over() -> None:
    bench = Bench()
    encoded = done(E, D)
    bench.feed(restore(encoded, holder="denoiser"))
    bench.join("encoder", copies=copies(encoded))
    bench.join("denoiser-1")
    bench.wait(GRACE - 0.5)
    assert bench.router.queue_depths()[D] == 0
    bench.wait(1.0)
    assert bench.view(R).attempt == 2
    (view,) = [view for view in bench.router.instances() if view.instance == "denoiser-1"]
    assert view.leases == (lease(D, 2),)


def test_a_lease_that_comes_back_after_the_grace_is_stopped() -> None:
    bench = Bench()
    bench.feed(restore(holder="encoder"))
    bench.wait(GRACE + 1.0, alive=False)
    bench.join("encoder-1")
    bench.join("encoder", leases=(lease(E),))
    assert [cancel.lease for cancel in bench.sent("encoder", Cancel)] == [lease(E)]


def test_outputs_that_are_gone_are_made_again() -> None:
    bench = Bench()
    bench.feed(restore(done(E, D), done(D, V)))
    assert bench.view(R).state is JobState.DECODER_WAITING
    bench.join("denoiser", life=2)
    assert bench.view(R).state is JobState.ENCODER_WAITING
    bench.join("encoder")
    assert bench.run("encoder").lease.attempt > 1


def test_a_decoder_that_reads_the_encoder_too_waits_for_both() -> None:
    bench = Bench()
    encoded, denoised = done(E, D, V), done(D, V)
    bench.feed(restore(encoded, denoised))
    bench.join("decoder")
    bench.join("denoiser", copies=copies(denoised))
    assert bench.sent("decoder", RunStage) == []
    bench.join("encoder", copies=copies(encoded))
    assert [m.copy for m in bench.run("decoder").inputs] == ["encoder.1>decoder", "denoiser.1>decoder"]
    assert [release.copies for release in bench.sent("encoder", Release)] == [("encoder.1>denoiser",)]


def test_a_lease_that_the_journal_had_no_time_for_goes_on_too() -> None:
    bench = Bench()
    bench.feed(restore())
    bench.join("encoder", leases=(lease(E, 3),))
    assert bench.sent("encoder", RunStage) == bench.sent("encoder", Cancel) == []
    bench.staged("encoder", lease(E, 3))
    assert bench.view(R).state is JobState.DENOISING_WAITING


def test_only_one_of_two_instances_may_go_on() -> None:
    bench = Bench()
    bench.feed(restore(holder="encoder-1", attempt=2))
    bench.join("encoder-0", leases=(lease(E, 1),))
    assert [cancel.lease for cancel in bench.sent("encoder-0", Cancel)] == [lease(E, 1)]
    bench.join("encoder-1", leases=(lease(E, 2),))
    assert bench.sent("encoder-1", Cancel) == []
    bench.join("encoder-2", leases=(lease(E, 2),))
    assert [cancel.lease for cancel in bench.sent("encoder-2", Cancel)] == [lease(E, 2)]


def test_a_held_request_can_be_cancelled_and_times_out() -> None:
    bench = Bench()
    encoded = done(E, D)
    bench.feed(restore(encoded, holder="denoiser"))
    bench.feed(CancelRequest(request=R))
    assert bench.updates[R][-1].state is JobState.CANCELLED
    bench.join("denoiser", leases=(lease(D),))
    assert [cancel.lease for cancel in bench.sent("denoiser", Cancel)] == [lease(D)]
    bench.join("encoder", copies=copies(encoded))
    assert [release.copies for release in bench.sent("encoder", Release)] == [("encoder.1>denoiser",)]
    bench.feed(restore(encoded, holder="denoiser-7", waited=599.0))
    bench.wait(2.0)
    assert bench.updates[R][-1].state is JobState.TIMED_OUT


def test_a_copy_that_the_hello_lists_and_the_outcome_of_a_resumed_lease_names_again_is_booked_once() -> None:
    """The journal knows the later of two stages; the earlier one is still running, and so is the later to the instance
    that has not heard of its acknowledgement."""
    bench = Bench()
    denoised = done(D, V)
    bench.feed(restore(denoised, holder="encoder"))
    bench.join("encoder", leases=(lease(E),))
    bench.started("encoder", lease(E))
    bench.staged("encoder", lease(E))
    bench.join("denoiser", leases=(lease(D),), copies=copies(denoised))
    (copy,) = [output.manifest.copy for output in denoised.outputs]
    bench.staged("denoiser", lease(D), (copy, V))  # the books are checked after each event
    bench.join("decoder")
    assert [manifest.copy for manifest in bench.run("decoder").inputs] == [copy]
