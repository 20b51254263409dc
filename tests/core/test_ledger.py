"""Ways back: lost instances and lost copies in every stage."""

from __future__ import annotations

import pytest

from triptych.core.events import InstanceExited, JobState, Received
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import Ack, Cancel, Dropped, Lease, Release, RunStage

from .harness import SERVER, Bench

E, D, V = ROLES


def lease(request: RequestId, role: Role, attempt: int = 1) -> Lease:
    return Lease(request, role, attempt)


def drop(bench: Bench, name: str, *copies: str) -> None:
    message = Dropped(
        instance=InstanceId(name),
        epoch=Epoch(f"{name}/1"),
        server_epoch=SERVER,
        copies=tuple(CopyId(copy) for copy in copies),
    )
    bench.feed(Received(message=message))


def kill(bench: Bench, name: str) -> None:
    bench.feed(InstanceExited(instance=InstanceId(name)))


def test_encoder_death_while_encoding() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.started("encoder", lease(request, E))
    kill(bench, "encoder")
    assert bench.view(request).state is JobState.ENCODER_WAITING
    bench.join("encoder", life=2)
    assert bench.run("encoder").lease == lease(request, E, 2)


def test_encoder_death_while_its_output_waits_for_a_denoiser() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.encode(request)
    assert bench.view(request).state is JobState.DENOISING_WAITING
    kill(bench, "encoder")
    assert bench.view(request).state is JobState.ENCODER_WAITING
    assert bench.view(request).attempt == 2


def test_encoder_death_before_its_output_was_pulled_stops_the_denoiser() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    kill(bench, "encoder")
    assert [cancel.lease for cancel in bench.sent("denoiser", Cancel)] == [lease(request, D)]
    assert bench.view(request).state is JobState.ENCODER_WAITING


def test_encoder_death_after_its_output_was_pulled_disturbs_nobody() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.fetched("denoiser", lease(request, D))
    kill(bench, "encoder")
    assert not bench.sent("denoiser", Cancel)
    bench.started("denoiser", lease(request, D))
    bench.staged("denoiser", lease(request, D))
    bench.decode(request)
    assert bench.view(request).state is JobState.DONE


def test_denoiser_death_while_denoising_pulls_again_and_computes_nothing_again() -> None:
    bench = Bench()
    bench.pool()
    bench.join("denoiser-1")
    request = bench.submit("r")
    bench.encode(request)
    bench.fetched("denoiser", lease(request, D))
    bench.progress("denoiser", lease(request, D), 4)
    kill(bench, "denoiser")
    run = bench.run("denoiser-1")
    assert run.lease == lease(request, D, 2)
    assert [m.copy for m in run.inputs] == ["r/encoder.1"]
    assert bench.view(request).step == 0


def test_denoiser_death_while_its_latents_wait_makes_everything_anew_that_is_gone() -> None:
    bench = Bench()
    bench.join("encoder")
    bench.join("denoiser")
    request = bench.submit("r")
    bench.encode(request)
    bench.denoise(request)
    assert bench.view(request).state is JobState.DECODER_WAITING
    kill(bench, "denoiser")
    assert bench.run("encoder").lease == lease(request, E, 2)
    bench.join("denoiser", life=2)
    bench.encode(request, attempt=2)
    bench.denoise(request, attempt=2)
    bench.join("decoder")
    bench.decode(request, attempt=2)
    assert bench.view(request).state is JobState.DONE


def test_decoder_death_costs_a_pull_and_no_denoising() -> None:
    bench = Bench()
    bench.pool()
    bench.join("decoder-1")
    request = bench.submit("r")
    bench.encode(request)
    bench.denoise(request)
    bench.fetched("decoder", lease(request, V))
    bench.started("decoder", lease(request, V))
    kill(bench, "decoder")
    run = bench.run("decoder-1")
    assert run.lease == lease(request, V, 2)
    assert [m.copy for m in run.inputs] == ["r/denoiser.1"]


def test_decoder_death_after_its_files_arrived_loses_nothing() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.denoise(request)
    bench.finished("decoder", lease(request, V))
    kill(bench, "decoder")
    assert bench.view(request).state is JobState.DECODER_RUNNING
    bench.stored(lease(request, V))
    assert bench.view(request).state is JobState.DONE


def test_an_output_for_the_decoder_that_is_lost_during_denoising_does_not_stop_the_denoiser() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request, "encoder", ("for-denoiser", D), ("for-decoder", V))
    bench.fetched("denoiser", lease(request, D))
    bench.started("denoiser", lease(request, D))
    drop(bench, "encoder", "for-decoder")
    assert not bench.sent("denoiser", Cancel)
    bench.staged("denoiser", lease(request, D))
    assert bench.run("encoder").lease == lease(request, E, 2)
    bench.started("encoder", lease(request, E, 2))
    bench.staged("encoder", lease(request, E, 2), ("again-denoiser", D), ("again-decoder", V))
    assert [release.copies for release in bench.sent("encoder", Release)] == [("again-denoiser",)]
    run = bench.run("decoder")
    assert run.lease == lease(request, V, 2)
    assert [m.copy for m in run.inputs] == ["again-decoder", "r/denoiser.1"]


def test_latents_that_are_lost_while_the_encoder_repeats_its_part_for_the_decoder() -> None:
    bench = Bench()
    bench.pool()
    request = bench.submit("r")
    bench.encode(request, "encoder", ("for-denoiser", D), ("for-decoder", V))
    bench.fetched("denoiser", lease(request, D))
    drop(bench, "encoder", "for-decoder")
    bench.staged("denoiser", lease(request, D))
    bench.started("encoder", lease(request, E, 2))
    drop(bench, "denoiser", "r/denoiser.1")
    bench.staged("encoder", lease(request, E, 2), ("again-denoiser", D), ("again-decoder", V))
    assert not bench.sent("encoder", Release)
    run = bench.run("denoiser")
    assert run.lease == lease(request, D, 2)
    assert [m.copy for m in run.inputs] == ["again-denoiser"]
    bench.denoise(request, attempt=2)
    bench.decode(request, attempt=2)
    assert bench.view(request).state is JobState.DONE


@pytest.mark.parametrize("copy", ["for-denoiser", "for-decoder"])
def test_a_dropped_copy_sends_a_queued_request_back_and_frees_its_sibling(copy: str) -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.encode(request, "encoder", ("for-denoiser", D), ("for-decoder", V))
    drop(bench, "encoder", copy)
    (sibling,) = {"for-denoiser", "for-decoder"} - {copy}
    assert [release.copies for release in bench.sent("encoder", Release)] == [(sibling,)]
    assert bench.run("encoder").lease == lease(request, E, 2)


def test_a_pool_that_drops_an_output_for_ever_fails_the_request_and_not_the_cluster() -> None:
    bench = Bench(max_attempts=3)
    bench.join("encoder")
    request = bench.submit("r")
    for attempt in (1, 2, 3):
        bench.encode(request, attempt=attempt)
        drop(bench, "encoder", f"r/encoder.{attempt}")
    view = bench.view(request)
    assert view.state is JobState.FAILED
    assert "attempt 3 on encoder: output dropped for room" in view.error.message  # type: ignore[union-attr]


def test_a_drop_after_the_pull_is_not_held_against_anybody() -> None:
    bench = Bench(max_attempts=1)
    bench.pool()
    request = bench.submit("r")
    bench.encode(request)
    bench.fetched("denoiser", lease(request, D))
    drop(bench, "encoder", "r/encoder.1")
    bench.started("denoiser", lease(request, D))
    bench.staged("denoiser", lease(request, D))
    bench.decode(request)
    assert bench.view(request).state is JobState.DONE


def test_a_late_result_of_an_old_attempt_is_acknowledged_released_and_otherwise_ignored() -> None:
    bench = Bench()
    bench.join("encoder", slots=2)
    request = bench.submit("r")
    for _ in range(4):
        bench.now += 0.6
        bench.beat("encoder")
    assert bench.router.view(request).attempt == 2  # type: ignore[union-attr]
    bench.staged("encoder", lease(request, E, 1))
    assert bench.counted("late_report") == 1
    assert bench.sent("encoder", Ack)
    assert [release.copies for release in bench.sent("encoder", Release)] == [("r/encoder.1",)]
    assert bench.router.view(request).state is JobState.ENCODER_WAITING  # type: ignore[union-attr]


def test_what_is_still_said_of_a_lease_that_was_taken_back_is_counted_and_its_end_is_not() -> None:
    bench = Bench()
    bench.join("encoder", slots=2)
    for name in ("stopped", "finished"):
        bench.started("encoder", lease(bench.submit(name), E))
        bench.cancel(RequestId(name))
        bench.progress("encoder", lease(RequestId(name), E), 1)
        assert bench.counted("late_report") == 1
    bench.stopped("encoder", lease(RequestId("stopped"), E))
    assert bench.counted("late_report") == 0
    bench.staged("encoder", lease(RequestId("finished"), E))
    assert bench.counted("late_report") == 1
    assert [release.copies for release in bench.sent("encoder", Release)] == [("finished/encoder.1",)]


def test_a_repeated_result_is_acknowledged_and_its_copies_stay() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.encode(request)
    bench.staged("encoder", lease(request, E))
    assert bench.sent("encoder", Ack)
    assert not bench.sent("encoder", Release)
    assert bench.copies_at("encoder") == ["r/encoder.1"]


def test_a_report_from_an_instance_that_does_not_hold_the_lease_moves_nothing() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    request = bench.submit("r")
    bench.staged("encoder-1", lease(request, E))
    assert bench.router.view(request).state is JobState.ENCODER_WAITING  # type: ignore[union-attr]
    assert bench.sent("encoder-1", Ack)
    assert bench.sent("encoder-1", Release)


def test_requests_of_a_lost_instance_keep_their_place_in_line() -> None:
    bench = Bench()
    bench.join("encoder", slots=2)
    names = [bench.submit(name) for name in ("a", "b", "c")]
    kill(bench, "encoder")
    assert [bench.router.view(name).position for name in names] == [0, 1, 2]  # type: ignore[union-attr]
    bench.join("encoder", life=2, slots=3)
    assert [run.lease.request for run in bench.sent("encoder", RunStage)] == names


def test_an_output_that_nobody_will_read_tells_all_the_same_how_much_room_the_next_one_needs() -> None:
    """Symptom: the instance stayed open for a stage whose output its pool would not hold."""
    bench = Bench()
    bench.join("encoder", slots=2, pool_bytes=100)
    first, _second, third = bench.submit("first"), bench.submit("second"), bench.submit("third")
    bench.staged("encoder", Lease(first, Role.ENCODER, 1), ("useless", Role.ENCODER), nbytes=80)
    assert bench.view(third).state is JobState.ENCODER_WAITING
    assert [view.free_slots for view in bench.router.instances()] == [1]
