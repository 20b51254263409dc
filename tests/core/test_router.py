from __future__ import annotations

import msgspec
import pytest

from triptych.core.events import CancelRequest, InstanceExited, JobState, StoreFailed, StoreFiles, Update
from triptych.core.states import TERMINAL
from triptych.ids import ROLES, InstanceId, RequestId, Role
from triptych.wire.messages import Ack, Cancel, ErrorInfo, Lease, Pull, Release, RunStage, Welcome
from triptych.wire.schema import HandoffSize

from .harness import FILE, SCHEMA, URLS, Bench

E, D, V = ROLES


def lease(request: RequestId, role: Role, attempt: int = 1) -> Lease:
    return Lease(request, role, attempt)


# -- the way of a request -----------------------------------------------------------------------------------------


def test_a_request_passes_all_states_and_ends_once() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    assert bench.run("encoder").inputs == ()
    bench.encode(request)
    assert [m.copy for m in bench.run("denoiser").inputs] == ["r/encoder.1"]
    bench.denoise(request)
    assert [m.copy for m in bench.run("decoder").inputs] == ["r/denoiser.1"]
    bench.decode(request)
    assert bench.states(request) == [
        "encoder_waiting",
        "encoder_running",
        "encoder_done",
        "denoising_waiting",
        "denoising_running",
        "denoising_done",
        "decoder_waiting",
        "decoder_running",
        "done",
    ]
    assert bench.router.view(request) is None
    assert bench.router.views() == ()


def test_a_state_stays_waiting_until_the_compute_thread_takes_the_stage_up() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    assert bench.router.view(request).state is JobState.ENCODER_WAITING  # type: ignore[union-attr]
    bench.started("encoder", lease(request, E))
    assert bench.view(request).state is JobState.ENCODER_RUNNING


def test_images_travel_with_the_encoder_stage_only() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    (send,) = [action for action in bench.out if getattr(action, "with_blobs", None)]
    assert send.with_blobs == request  # type: ignore[union-attr]
    bench.encode(request)
    assert not [action for action in bench.out if getattr(action, "with_blobs", None)]


def test_a_copy_is_kept_until_its_reader_is_done() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.fetched("denoiser", lease(request, D))
    bench.started("denoiser", lease(request, D))
    assert not bench.sent("encoder", Release)
    bench.staged("denoiser", lease(request, D))
    (release,) = bench.sent("encoder", Release)
    assert release.copies == ("r/encoder.1",)


@pytest.mark.parametrize("told", [True, False], ids=["before", "with its end"])
def test_what_fetching_took_is_known_whether_it_was_told_before_or_with_the_end(told: bool) -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    if told:
        bench.fetched("denoiser", lease(request, D))
        bench.started("denoiser", lease(request, D))
    bench.staged("denoiser", lease(request, D), pull=Pull(seconds=0.25, nbytes=64, plane="shm"))
    timing = bench.view(request).timings[-1]
    assert (timing.role, timing.pulling, timing.pulled_bytes, timing.plane) == (D, 0.25, 64, "shm")


def test_the_decoder_may_read_what_the_encoder_made() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request, "encoder", ("for-denoiser", D), ("for-decoder", V))
    bench.denoise(request)
    assert [m.copy for m in bench.run("decoder").inputs] == ["for-decoder", "r/denoiser.1"]
    bench.started("decoder", lease(request, V))
    bench.finished("decoder", lease(request, V))
    assert not bench.sent("encoder", Release), "the decoder may die before its files are stored"
    bench.stored(lease(request, V))
    assert [release.copies for release in bench.sent("encoder", Release)] == [("for-decoder",)]
    assert [release.copies for release in bench.sent("denoiser", Release)] == [("r/denoiser.1",)]


def test_files_are_acknowledged_only_when_they_are_stored() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.denoise(request)
    bench.started("decoder", lease(request, V))
    bench.finished("decoder", lease(request, V))
    (store,) = bench.all(StoreFiles)
    assert (store.lease, store.files) == (lease(request, V), (FILE,))
    assert not bench.sent("decoder", Ack)
    bench.finished("decoder", lease(request, V))
    assert not bench.all(StoreFiles)
    assert not bench.sent("decoder", Ack)
    bench.stored(lease(request, V))
    assert [ack.leases for ack in bench.sent("decoder", Ack)] == [(lease(request, V),)]
    assert bench.view(request).state is JobState.DONE
    bench.finished("decoder", lease(request, V))
    assert bench.sent("decoder", Ack), "its acknowledgement was lost: it asks again"
    assert not bench.all(Update)


DISK_FULL = ErrorInfo(code="storage_full", message="no space left", blame="operator", retryable=True)


def finished(bench: Bench, run_timeout: float = 600.0) -> RequestId:
    """A request whose files have just arrived."""
    bench.pool()
    request = bench.submit("r", run_timeout=run_timeout)
    bench.encode(request)
    bench.denoise(request)
    bench.started("decoder", lease(request, V))
    bench.finished("decoder", lease(request, V))
    return request


def test_files_that_cannot_be_stored_stay_with_the_decoder_and_are_stored_when_the_store_is_back() -> None:
    bench = Bench()
    request = finished(bench)
    for _ in range(3):
        bench.feed(StoreFailed(request=request, attempt=1, error=DISK_FULL))
        assert bench.counted("store_failed") == 1
        assert not bench.sent("decoder", Ack)
        assert bench.view(request).state is JobState.DECODER_RUNNING
        bench.finished("decoder", lease(request, V))  # sent again, for want of an acknowledgement
        assert len(bench.all(StoreFiles)) == 1
        bench.finished("decoder", lease(request, V))
        assert not bench.all(StoreFiles), "one try at a time"
    bench.stored(lease(request, V))
    assert bench.view(request).state is JobState.DONE
    assert bench.sent("decoder", Ack)
    assert len(bench.view(request).timings) == 3


def test_a_store_that_does_not_come_back_fails_the_request_at_its_run_timeout_with_the_reason() -> None:
    bench = Bench()
    request = finished(bench, run_timeout=20.0)
    bench.feed(StoreFailed(request=request, attempt=1, error=DISK_FULL))
    bench.finished("decoder", lease(request, V))
    bench.feed(StoreFailed(request=request, attempt=1, error=DISK_FULL))
    bench.wait(21.0)
    view = bench.view(request)
    assert view.state is JobState.FAILED
    assert view.error is not None
    assert view.error.code == "storage_full"
    assert view.error.message == "no space left; tried 2 times until the run timeout of 20 s"
    bench.finished("decoder", lease(request, V))
    assert bench.sent("decoder", Ack), "it need not keep them any longer"


def test_files_that_no_store_can_take_fail_the_request_at_once() -> None:
    bench = Bench()
    request = finished(bench)
    error = ErrorInfo(code="storage_failed", message="a suffix that is none", blame="operator")
    bench.feed(StoreFailed(request=request, attempt=1, error=error))
    assert (bench.view(request).state, bench.view(request).error) == (JobState.FAILED, error)
    assert bench.sent("decoder", Ack)


@pytest.mark.parametrize("writing", [False, True], ids=["between two tries", "during a try"])
def test_a_decoder_that_dies_with_files_that_were_not_stored_costs_one_decoding(writing: bool) -> None:
    bench = Bench()
    request = finished(bench)
    bench.join("decoder-2")
    failed = StoreFailed(request=request, attempt=1, error=DISK_FULL)
    if not writing:
        bench.feed(failed)
    bench.feed(InstanceExited(instance=InstanceId("decoder")))
    if writing:
        assert bench.view(request).state is JobState.DECODER_RUNNING, "what has arrived may yet be stored"
        bench.feed(failed)
    assert bench.run("decoder-2").lease == lease(request, V, 2)
    bench.decode(request, "decoder-2", attempt=2)
    assert bench.view(request).state is JobState.DONE
    assert [timing.role for timing in bench.view(request).timings] == [E, D, V, V]


def test_timings_say_where_the_time_went() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.now += 2.0
    bench.started("encoder", lease(request, E))
    bench.now += 1.0
    bench.staged("encoder", lease(request, E))
    bench.fetched("denoiser", lease(request, D))
    bench.now += 3.0
    bench.started("denoiser", lease(request, D))
    encoder, *_ = bench.view(request).timings
    assert (encoder.waiting, encoder.running, encoder.compute, encoder.staging) == (2.0, 1.0, 1.0, 0.125)
    bench.now += 10.0
    bench.staged("denoiser", lease(request, D))
    _, denoiser = bench.view(request).timings
    assert (denoiser.waiting, denoiser.running) == (3.0, 10.0)
    assert (denoiser.pulling, denoiser.pulled_bytes, denoiser.plane) == (0.25, 64, "shm")
    assert (bench.view(request).waiting_seconds, bench.view(request).running_seconds) == (5.0, 11.0)


def test_progress_is_shown_and_never_runs_backwards() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.progress("denoiser", lease(request, D), 3)
    assert (bench.view(request).step, bench.view(request).steps) == (3, 10)
    bench.progress("denoiser", lease(request, D), 2)
    assert not bench.all(Update)
    assert bench.router.view(request).step == 3  # type: ignore[union-attr]


def test_a_preview_is_shown_while_it_is_denoised_and_kept_no_longer() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.progress("denoiser", lease(request, D), 3, preview=b"picture")
    assert bench.view(request).preview == b"picture"
    bench.progress("denoiser", lease(request, D), 2, preview=b"later")
    assert (bench.view(request).step, bench.view(request).preview) == (3, b"later")
    bench.staged("denoiser", lease(request, D))
    assert bench.view(request).preview == b""


def test_words_that_were_lost_are_implied_by_later_ones() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.staged("encoder", lease(request, E))
    bench.progress("denoiser", lease(request, D), 1)
    assert bench.view(request).state is JobState.DENOISING_RUNNING
    bench.staged("denoiser", lease(request, D))
    bench.finished("decoder", lease(request, V))
    bench.stored(lease(request, V))
    assert bench.view(request).state is JobState.DONE


def test_a_request_submitted_twice_runs_once() -> None:
    bench = Bench()
    bench.pool(slots=4)
    bench.submit("r")
    bench.submit("r")
    assert bench.counted("duplicate_submit") == 1
    assert not bench.sent("encoder", RunStage)


# -- dispatch -----------------------------------------------------------------------------------------------------


def test_requests_are_served_in_order_of_acceptance_and_know_their_place() -> None:
    bench = Bench()
    bench.pool()
    first, second, third = (bench.submit(name) for name in ("a", "b", "c"))
    assert (bench.view(second).position, bench.view(third).position) == (0, 1)
    assert bench.router.queue_depths() == {E: 2, D: 0, V: 0}
    bench.encode(first)
    assert bench.run("encoder").lease.request == second
    assert bench.router.view(third).position == 0  # type: ignore[union-attr]


def test_an_instance_that_is_full_does_not_hold_up_one_that_is_free() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    for name in ("a", "b", "c"):
        bench.submit(name)
    holders = {view.instance: view.leases for view in bench.router.instances()}
    assert {name: len(leases) for name, leases in holders.items()} == {"encoder-0": 1, "encoder-1": 1}
    bench.encode(RequestId("b"), "encoder-1")
    assert bench.run("encoder-1").lease.request == "c"


def test_slots_are_shared_by_all_roles_of_an_instance_and_later_stages_go_first() -> None:
    bench = Bench()
    bench.join("any", E, D, V, slots=1)
    first = bench.submit("a")
    second = bench.submit("b")
    bench.encode(first, "any")
    assert bench.run("any").lease == lease(first, D)
    bench.denoise(first, "any")
    assert bench.run("any").lease == lease(first, V)
    bench.decode(first, "any")
    assert bench.run("any").lease == lease(second, E)


def test_round_robin_spreads_over_the_instances() -> None:
    bench = Bench(dispatch_policy="round_robin")
    for number in range(3):
        bench.join(f"encoder-{number}", slots=2)
    for number in range(6):
        bench.submit(f"r{number}")
    order = [[held.request for held in view.leases] for view in bench.router.instances()]
    assert order == [["r0", "r3"], ["r1", "r4"], ["r2", "r5"]]


def test_max_free_slots_fills_the_emptiest_instance() -> None:
    bench = Bench(dispatch_policy="max_free_slots")
    bench.join("encoder-0", slots=1)
    bench.join("encoder-1", slots=3)
    for number in range(3):
        bench.submit(f"r{number}")
    assert [len(view.leases) for view in bench.router.instances()] == [1, 2]


@pytest.mark.parametrize(("policy", "beside"), [("round_robin", "long"), ("least_work", "short")])
def test_least_work_puts_nothing_behind_a_long_request_while_another_instance_is_nearly_done(
    policy: str, beside: str
) -> None:
    bench = Bench(dispatch_policy=policy)
    for name in ("encoder", "denoiser-0", "denoiser-1"):
        bench.join(name, slots=2)
    for name in ("one", "two"):  # what a step takes is learnt from a stage that ends, here a second for ten
        bench.encode(bench.submit(name, num_inference_steps=10))
        bench.denoise(RequestId(name), next(at for at in ("denoiser-0", "denoiser-1") if bench.sent(at, RunStage)))
    places: dict[str, str] = {}
    for name, steps in (("long", 500), ("short", 10), ("next", 10)):
        bench.encode(bench.submit(name, num_inference_steps=steps))
        places[name] = next(at for at in ("denoiser-0", "denoiser-1") if bench.sent(at, RunStage))
    assert places["long"] != places["short"]
    assert places["next"] == places[beside]


def test_a_pool_without_room_holds_back_stages_that_would_overflow_it() -> None:
    bench = Bench()
    bench.join("encoder", slots=2, pool_bytes=100)
    first, second, third = (bench.submit(name) for name in ("a", "b", "c"))
    bench.staged("encoder", lease(first, E), nbytes=60)
    assert not bench.sent("encoder", RunStage), "one copy of 60 bytes lies there and another stage will make one"
    bench.stopped("encoder", lease(second, E))
    bench.feed(CancelRequest(request=first))
    assert bench.run("encoder").lease.request in (second, third), "the copy was released"


def test_a_free_slot_is_used_at_once_by_an_instance_that_joins_later() -> None:
    bench = Bench()
    request = bench.submit("r")
    assert bench.view(request).position == 0
    bench.join("encoder")
    assert bench.run("encoder").lease == lease(request, E)


def test_running_time_that_is_left_travels_as_budget() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r", run_timeout=30.0)
    assert bench.run("encoder").budget_seconds == 30.0
    bench.started("encoder", lease(request, E))
    bench.now += 4.0
    bench.staged("encoder", lease(request, E))
    assert bench.run("denoiser").budget_seconds == 26.0


# -- failures -----------------------------------------------------------------------------------------------------


def test_a_failure_for_good_fails_the_request_with_the_instances_own_error() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.failed("encoder", lease(request, E), retryable=False)
    view = bench.view(request)
    assert view.state is JobState.FAILED
    assert view.error is not None
    assert view.error.message == "it broke"
    assert bench.sent("encoder", Ack)


def test_a_failed_stage_is_tried_again_on_another_instance() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    request = bench.submit("r")
    bench.failed("encoder-0", lease(request, E))
    assert bench.run("encoder-1").lease == lease(request, E, 2)


def test_an_instance_that_fails_at_once_does_not_eat_the_requests_that_it_failed() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    victim, other = bench.submit("a"), bench.submit("b")
    bench.failed("encoder-0", lease(victim, E))
    assert not bench.sent("encoder-0", RunStage), "the other one is busy, but it lives"
    newcomer = bench.submit("c")
    assert bench.run("encoder-0").lease.request == newcomer, "others are not held up"
    bench.encode(other, "encoder-1")
    assert bench.run("encoder-1").lease == lease(victim, E, 2)


def test_attempts_come_to_an_end_with_evidence() -> None:
    bench = Bench(max_attempts=3)
    bench.join("encoder")
    request = bench.submit("r")
    for attempt in (1, 2, 3):
        assert bench.view(request).state not in TERMINAL
        bench.failed("encoder", lease(request, E, attempt))
    view = bench.view(request)
    assert view.state is JobState.FAILED
    assert view.error is not None
    assert view.error.message == (
        "the encoder stage failed 3 times: attempt 1 on encoder: it broke; attempt 2 on encoder: it broke; "
        "attempt 3 on encoder: it broke"
    )


def test_a_failed_pull_from_a_live_sender_is_tried_again_before_anything_is_computed_again() -> None:
    bench = Bench()
    bench.pool()
    bench.join("denoiser-1")
    request = bench.submit("r")
    bench.encode(request)
    bench.failed("denoiser", lease(request, D), "r/encoder.1")
    again = bench.run("denoiser-1")
    assert again.lease == lease(request, D, 2)
    assert [m.copy for m in again.inputs] == ["r/encoder.1"]
    bench.failed("denoiser-1", lease(request, D, 2), "r/encoder.1")
    assert bench.sent("encoder", Release), "two failures: the copy is given up"
    assert bench.run("encoder").lease == lease(request, E, 3)


def test_instances_that_can_never_pull_from_each_other_end_in_a_failure_and_not_in_a_loop() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    for _ in range(100):
        (view,) = bench.router.views() or (None,)
        if view is None:
            break
        if view.state is JobState.ENCODER_WAITING:
            bench.encode(request, attempt=view.attempt)
        else:
            (held,) = next(v.leases for v in bench.router.instances() if v.instance == "denoiser")
            (copy,) = bench.copies_at("encoder")
            bench.failed("denoiser", held, copy)
    assert bench.view(request).state is JobState.FAILED
    assert "denoiser stage failed 4 times" in bench.view(request).error.message  # type: ignore[union-attr]


@pytest.mark.parametrize("role", [E, V])
def test_an_outcome_that_makes_no_sense_fails_its_request_only(role: Role) -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    if role is E:
        bench.finished("encoder", lease(request, E))
    else:
        bench.encode(request)
        bench.denoise(request)
        bench.staged("decoder", lease(request, V))
    assert bench.view(request).state is JobState.FAILED
    assert bench.view(request).error.code == "protocol_error"  # type: ignore[union-attr]


# -- cancelling ---------------------------------------------------------------------------------------------------


def test_cancel_while_queued_ends_at_once() -> None:
    bench = Bench()
    request = bench.submit("r")
    bench.feed(CancelRequest(request=request))
    assert bench.view(request).state is JobState.CANCELLED
    assert bench.router.queue_depths()[E] == 0


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("started", [False, True], ids=["leased", "running"])
def test_cancel_of_a_leased_stage_stops_it_and_its_slot_stays_taken_until_it_says_so(role: Role, started: bool) -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    if role is not E:
        bench.encode(request)
    if role is V:
        bench.denoise(request)
    if started:
        bench.started(role, lease(request, role))
    bench.feed(CancelRequest(request=request))
    assert [cancel.lease for cancel in bench.sent(role, Cancel)] == [lease(request, role)]
    assert bench.view(request).state is JobState.CANCELLED
    assert not any(view.copies for view in bench.router.instances()), "what it staged is released"
    held = {view.instance: view.leases for view in bench.router.instances()}
    assert held[role] == (lease(request, role),)
    bench.stopped(role, lease(request, role))
    assert bench.sent(role, Ack)
    assert not bench.all(Update)
    assert all(view.free_slots == view.slots for view in bench.router.instances())


def test_cancel_while_files_are_stored() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.denoise(request)
    bench.finished("decoder", lease(request, V))
    bench.feed(CancelRequest(request=request))
    assert bench.view(request).state is JobState.CANCELLED
    assert bench.sent("decoder", Ack)
    assert not bench.sent("decoder", Cancel)
    bench.stored(lease(request, V))
    assert not bench.all(Update)


def test_cancel_is_idempotent_and_knows_no_ended_or_unknown_request() -> None:
    bench = Bench()
    request = bench.submit("r")
    bench.feed(CancelRequest(request=request))
    for name in (request, RequestId("never heard of")):
        assert bench.feed(CancelRequest(request=name)) == []


def test_a_result_that_crosses_its_cancel_is_acknowledged_and_thrown_away() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.started("encoder", lease(request, E))
    bench.feed(CancelRequest(request=request))
    bench.staged("encoder", lease(request, E))
    assert bench.sent("encoder", Ack)
    assert [release.copies for release in bench.sent("encoder", Release)] == [("r/encoder.1",)]
    assert not bench.all(Update)
    assert all(view.free_slots == view.slots for view in bench.router.instances())


def test_results_go_to_the_ports_that_the_router_was_made_with() -> None:
    bench = Bench()
    bench.join("encoder")
    (welcome,) = bench.sent("encoder", Welcome)
    assert welcome.result_urls == URLS


def test_memory_stays_flat_over_many_requests() -> None:
    bench = Bench()
    bench.pool()
    for number in range(300):
        request = bench.submit(f"r{number}")
        bench.encode(request)
        bench.denoise(request)
        bench.decode(request)
    ledger = bench.router._ledger
    assert not ledger.jobs
    assert all(not member.grants and not member.copies for member in ledger.members.values())
    assert len(ledger.job_deadlines) == 0
    assert len(ledger.job_deadlines._heap) < 200


BIG = {"height": 64, "width": 64, "num_frames": 5}
"""Latents of 4 x 16 x 2 x 8 x 8 = 8,192 bytes."""


def pools_of(*sizes: int) -> Bench:
    """Denoisers with such transfer pools, and one encoder."""
    schema = msgspec.structs.replace(SCHEMA, handoff=HandoffSize(channels=16, spatial=8, temporal=4, item_bytes=4))
    bench = Bench()
    bench.join("encoder", slots=8, schema=schema)
    for number, size in enumerate(sizes):
        bench.join(f"denoiser-{number}", slots=1, pool_bytes=size, schema=schema)
    return bench


def test_latents_are_denoised_where_the_pool_can_hold_them_and_others_pass_them_meanwhile() -> None:
    bench = pools_of(8_191, 8_192)
    big, next_big, small = bench.submit("big", **BIG), bench.submit("next", **BIG), bench.submit("small")
    bench.encode(big)
    assert bench.run("denoiser-1").lease == lease(big, D)
    bench.encode(next_big)
    assert bench.view(next_big).state is JobState.DENOISING_WAITING
    bench.encode(small)
    assert bench.run("denoiser-0").lease == lease(small, D)
    bench.denoise(big, "denoiser-1")
    assert bench.run("denoiser-1").lease == lease(next_big, D)


def test_a_stage_that_failed_on_the_only_large_pool_is_tried_there_again() -> None:
    bench = pools_of(8_191, 8_192)
    big = bench.submit("big", **BIG)
    bench.encode(big)
    bench.failed("denoiser-1", lease(big, D))
    assert bench.run("denoiser-1").lease == lease(big, D, 2)


def test_what_an_encoder_makes_of_a_picture_is_made_where_the_pool_can_hold_it() -> None:
    schema = msgspec.structs.replace(
        SCHEMA, handoff=HandoffSize(channels=1, condition_channels=16, spatial=8, temporal=4, item_bytes=4)
    )
    bench = Bench()
    for number, size in enumerate((8_191, 8_192)):
        bench.join(f"encoder-{number}", slots=2, pool_bytes=size, schema=schema)
    bench.submit("small")
    for name in ("big", "next"):
        request = bench.submit(name, **BIG)
        assert bench.run("encoder-1").lease == lease(request, E)


def test_latents_that_no_live_pool_can_hold_wait_for_one_and_the_timeout_says_so() -> None:
    bench = pools_of(8_191)
    lucky = bench.submit("lucky", **BIG)
    bench.encode(lucky)
    assert bench.view(lucky).state is JobState.DENOISING_WAITING
    bench.join("denoiser-9", pool_bytes=8_192, schema=bench.router.schema)
    assert bench.run("denoiser-9").lease == lease(lucky, D)
    bench.feed(InstanceExited(instance=InstanceId("denoiser-9")))
    bench.wait(601)
    error = bench.view(lucky).error
    assert error is not None
    assert "takes 8192 bytes" in error.message
    assert "has 8191" in error.message
