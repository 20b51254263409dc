"""Instances that fail requests in a row, and requests that instances die of."""

from __future__ import annotations

import pytest

from triptych.core.events import CancelRequest, InstanceExited, JobState
from triptych.core.health import LONGEST, Health
from triptych.ids import InstanceId, RequestId, Role
from triptych.wire.messages import Checkpointed, Goodbye, Kept, Lease, RunStage

from .harness import Bench, manifest

E, D = Role.ENCODER, Role.DENOISER


def lease(request: str, role: Role, attempt: int = 1) -> Lease:
    return Lease(RequestId(request), role, attempt)


def quarantined(bench: Bench, name: str) -> float:
    """Seconds for which an instance is in quarantine."""
    (view,) = [view for view in bench.router.instances() if view.instance == name]
    return view.quarantined


def runs(bench: Bench) -> dict[str, Lease]:
    """What each instance holds."""
    return {view.instance: held for view in bench.router.instances() for held in view.leases}


def fail_on(bench: Bench, name: str, *requests: str) -> None:
    """Submit each request and let ``name`` fail it for good, and every other instance do it."""
    for request in requests:
        bench.submit(request)
        for holder, held in runs(bench).items():
            bench.started(holder, held)
            if holder == name:
                bench.failed(holder, held, retryable=False)
            else:
                bench.staged(holder, held)


# -- instances ------------------------------------------------------------------------------------------------------


def test_an_instance_that_fails_three_requests_in_a_row_gets_nothing_while_another_one_lives() -> None:
    bench = Bench(quarantine_seconds=30.0)
    bench.join("encoder-0")
    fail_on(bench, "encoder-0", "a", "b")
    assert quarantined(bench, "encoder-0") == 0
    fail_on(bench, "encoder-0", "c")
    assert bench.counted("instance_quarantined") == 1
    assert quarantined(bench, "encoder-0") == 30.0
    bench.join("encoder-1")
    for name in ("d", "e", "f"):
        bench.submit(name)
    assert runs(bench) == {"encoder-1": lease("d", E)}


def test_a_quarantine_that_never_ends_well_stays_at_its_longest() -> None:
    health, now = Health(), 0.0
    for round in range(3000):
        now += 2 * LONGEST
        for request in range(3):
            health.fail(RequestId(f"{round}.{request}"), "broken", now, limit=3, cooldown=30.0)
    assert health.quarantined(now)
    assert not health.quarantined(now + LONGEST + 1)


def test_the_last_instance_of_a_role_goes_on_being_used_in_quarantine() -> None:
    bench = Bench()
    bench.join("encoder")
    fail_on(bench, "encoder", "a", "b", "c")
    assert quarantined(bench, "encoder") > 0
    bench.submit("d")
    assert runs(bench) == {"encoder": lease("d", E)}


def test_one_request_that_fails_again_and_again_is_no_proof_against_an_instance() -> None:
    bench = Bench(max_attempts=6)
    bench.join("encoder")
    request = bench.submit("r")
    for attempt in range(1, 6):
        bench.started("encoder", lease(request, E, attempt))
        bench.failed("encoder", lease(request, E, attempt))
    assert quarantined(bench, "encoder") == 0


def test_a_success_between_clears_the_record() -> None:
    bench = Bench()
    bench.join("encoder")
    fail_on(bench, "encoder", "a", "b")
    bench.submit("good")
    bench.encode(RequestId("good"))
    bench.join("denoiser")
    bench.fetched("denoiser", lease("good", D))
    fail_on(bench, "encoder", "c", "d")
    assert quarantined(bench, "encoder") == 0


def test_when_its_time_is_over_it_is_tried_again_and_one_failure_is_too_many_for_twice_as_long() -> None:
    bench = Bench(quarantine_seconds=30.0)
    bench.join("encoder-0")
    fail_on(bench, "encoder-0", "a", "b", "c")
    bench.join("encoder-1")
    bench.wait(31.0)
    assert quarantined(bench, "encoder-0") == 0
    bench.submit("d")
    bench.submit("e")
    assert set(runs(bench)) == {"encoder-0", "encoder-1"}
    held = runs(bench)["encoder-0"]
    bench.started("encoder-0", held)
    bench.failed("encoder-0", held, retryable=False)
    assert quarantined(bench, "encoder-0") == 60.0


def test_a_failure_that_is_the_callers_is_not_held_against_anybody() -> None:
    bench = Bench()
    bench.join("encoder")
    for name in ("a", "b", "c"):
        request = bench.submit(name)
        bench.started("encoder", lease(request, E))
        bench.failed("encoder", lease(request, E), retryable=False, blame="caller")
        request = bench.submit(f"{name}-large")
        bench.started("encoder", lease(request, E))
        bench.failed("encoder", lease(request, E), retryable=False, code="out_of_memory")
    assert quarantined(bench, "encoder") == 0


def prove(bench: Bench, *encoders: str) -> None:
    """Have each encoder do a request, which a denoiser takes over and its client gives up."""
    bench.join("denoiser")
    for name in encoders:
        request = bench.submit(f"good-{name}-{bench.now}")
        (holder,) = [holder for holder, held in runs(bench).items() if held.role is E]
        while holder != name:
            bench.feed(CancelRequest(request=request))
            bench.stopped(holder, lease(request, E))
            request = bench.submit(f"{request}-again")
            (holder,) = [holder for holder, held in runs(bench).items() if held.role is E]
        bench.encode(request, name)
        bench.fetched("denoiser", lease(request, D))
        bench.feed(CancelRequest(request=request))
        bench.stopped("denoiser", lease(request, D))


def fail_everywhere(bench: Bench, request: str) -> None:
    """Submit a request that every encoder which gets it fails for good."""
    bench.submit(request)
    while holding := [(name, held) for name, held in runs(bench).items() if held.role is E]:
        ((name, held),) = holding
        bench.started(name, held)
        bench.failed(name, held, retryable=False)


def test_a_request_that_sound_instances_fail_alike_is_no_evidence_against_any_of_them() -> None:
    """Symptom: a client that repeated a request which no pipeline can compute had each encoder but the last set aside
    for 30 s and more."""
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    prove(bench, "encoder-0", "encoder-1")
    for number in range(4):
        fail_everywhere(bench, f"bad-{number}")
        view = bench.view(RequestId(f"bad-{number}"))
        assert view.state is JobState.FAILED
        assert view.attempt == 2
        assert view.error is not None
        assert view.error.message == "it broke"
        assert quarantined(bench, "encoder-0") == quarantined(bench, "encoder-1") == 0


def test_what_another_instance_can_do_is_done_and_held_against_the_one_that_failed_it() -> None:
    bench = Bench(quarantine_seconds=30.0)
    bench.join("encoder-0")
    bench.join("encoder-1")
    prove(bench, "encoder-0", "encoder-1")
    for number in range(20):
        request = bench.submit(f"r{number}")
        while bench.view(request).state is not JobState.DENOISING_WAITING:
            ((name, held),) = [(name, held) for name, held in runs(bench).items() if held.role is E]
            bench.started(name, held)
            if name == "encoder-0":
                bench.failed(name, held, retryable=False)
            else:
                bench.staged(name, held)
        if quarantined(bench, "encoder-0"):
            break
        bench.fetched("denoiser", lease(request, D))
        bench.feed(CancelRequest(request=request))
        bench.stopped("denoiser", lease(request, D))
    assert quarantined(bench, "encoder-0") == 30.0
    assert quarantined(bench, "encoder-1") == 0


def test_an_instance_that_never_did_anything_clears_nobody() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    for number in range(3):
        fail_everywhere(bench, f"r{number}")
    assert quarantined(bench, "encoder-0") > 0
    assert quarantined(bench, "encoder-1") > 0


def test_instances_that_break_together_do_not_clear_each_other_for_ever() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    prove(bench, "encoder-0", "encoder-1")
    for number in range(10):
        fail_everywhere(bench, f"r{number}")
    assert quarantined(bench, "encoder-0") > 0
    assert quarantined(bench, "encoder-1") > 0


def test_a_quarantine_ends_when_one_of_its_failures_turns_out_to_be_the_requests() -> None:
    health = Health(proven=True)
    for name in ("a", "b", "c"):
        health.fail(RequestId(name), "broken", 0.0, limit=3, cooldown=30.0)
    assert health.quarantined(1.0)
    health.share(RequestId("c"), 1.0, limit=3)
    assert not health.quarantined(1.0)
    assert health.fail(RequestId("d"), "broken", 2.0, limit=3, cooldown=30.0)
    assert health.until == 32.0, "the one that ended was none"


def test_without_another_instance_or_attempt_a_failure_for_good_is_the_end() -> None:
    for attempts, encoders in ((4, 1), (1, 2)):
        bench = Bench(max_attempts=attempts)
        for number in range(encoders):
            bench.join(f"encoder-{number}")
        fail_everywhere(bench, "r")
        view = bench.view(RequestId("r"))
        assert view.state is JobState.FAILED
        assert view.attempt == 1
        assert view.error is not None
        assert view.error.message == "it broke"


def test_a_restart_begins_with_a_clean_record_unless_the_process_died_of_a_request() -> None:
    bench = Bench()
    bench.join("encoder")
    fail_on(bench, "encoder", "a", "b", "c")
    bench.join("encoder", life=2)
    assert quarantined(bench, "encoder") == 0
    for life, name in enumerate(("d", "e", "f"), 2):
        request = bench.submit(name)
        bench.started("encoder", lease(request, E))
        bench.feed(InstanceExited(instance=InstanceId("encoder")))
        bench.cancel(request)
        bench.join("encoder", life=life + 1)
    assert quarantined(bench, "encoder") > 0


def test_a_sender_that_nobody_can_pull_from_is_blamed_and_its_receivers_are_not() -> None:
    bench = Bench(max_attempts=9)
    bench.join("encoder")
    bench.join("denoiser-0")
    bench.join("denoiser-1")
    for name in ("a", "b", "c"):
        request = bench.submit(name)
        held = runs(bench)["encoder"]
        bench.started("encoder", held)
        bench.staged("encoder", held)
        for attempt in (1, 2):
            (holder,) = [holder for holder, held in runs(bench).items() if held.role is D]
            bench.failed(holder, lease(request, D, attempt), f"{name}/encoder.1")
        bench.cancel(request)
        bench.stopped("encoder", lease(request, E, 3))
    assert quarantined(bench, "encoder") > 0
    assert quarantined(bench, "denoiser-0") == quarantined(bench, "denoiser-1") == 0


# -- requests -------------------------------------------------------------------------------------------------------


def test_a_request_that_two_instances_died_of_is_not_tried_a_third_time() -> None:
    bench = Bench()
    for number in range(3):
        bench.join(f"encoder-{number}")
    request = bench.submit("poison")
    for attempt in (1, 2):
        (holder,) = runs(bench)
        bench.started(holder, lease(request, E, attempt))
        bench.feed(InstanceExited(instance=InstanceId(holder)))
    view = bench.view(request)
    assert view.state is JobState.FAILED
    assert view.error is not None
    assert view.error.code == "poison"
    assert view.error.message.startswith("2 instances died of the encoder stage")
    assert "attempt 1 on encoder-0: instance lost: process exited" in view.error.message
    assert "attempt 2 on encoder-1: instance lost: process exited" in view.error.message
    assert len(bench.router.instances()) == 1


def test_a_request_that_breaks_instances_from_within_is_not_tried_a_third_time_either() -> None:
    bench = Bench()
    for number in range(3):
        bench.join(f"encoder-{number}")
    request = bench.submit("poison")
    for attempt in (1, 2):
        (holder,) = runs(bench)
        bench.started(holder, lease(request, E, attempt))
        died = "the compute thread died: RuntimeError: device-side assert"
        bench.receive(Goodbye(**bench._signed(holder), reason=died, failed=True))
    error = bench.view(request).error
    assert error is not None
    assert error.code == "poison"
    assert "attempt 2 on encoder-1: instance lost: the compute thread died: RuntimeError" in error.message


def test_instances_that_leave_when_they_are_asked_to_cost_a_request_nothing() -> None:
    bench = Bench()
    request = bench.submit("r")
    for attempt in range(1, 6):
        bench.join("encoder", life=attempt)
        bench.started("encoder", lease(request, E, attempt))
        bench.receive(Goodbye(**bench._signed("encoder"), reason="SIGTERM"))
    assert bench.view(request).state is JobState.ENCODER_WAITING


def test_a_request_that_gets_further_each_time_is_not_what_its_instances_die_of() -> None:
    bench = Bench()
    bench.join("encoder")
    bench.join("decoder")  # keeps the checkpoints
    request = bench.submit("r")
    bench.encode(request)
    for attempt, step in ((1, 3), (2, 6), (3, 9)):
        name = f"denoiser-{attempt}"
        bench.join(name)
        bench.started(name, lease(request, D, attempt))
        saved = manifest(f"at-{step}", request, name)
        bench.receive(
            Checkpointed(**bench._signed(name), lease=lease(request, D, attempt), manifest=saved, step=step, steps=10)
        )
        kept = manifest(f"kept-{step}", request, "decoder")
        bench.receive(Kept(**bench._signed("decoder"), copy=saved.copy, manifest=kept))
        bench.feed(InstanceExited(instance=InstanceId(name)))
    assert bench.view(request).state is JobState.DENOISING_WAITING
    bench.join("denoiser-4")
    bench.started("denoiser-4", lease(request, D, 4))
    bench.feed(InstanceExited(instance=InstanceId("denoiser-4")))
    assert bench.view(request).state is JobState.FAILED


@pytest.mark.parametrize("returns", [True, False])
def test_an_instance_that_was_only_silent_was_not_killed(returns: bool) -> None:
    bench = Bench()
    request = bench.submit("r")
    for number in range(2):
        name = f"encoder-{number}"
        bench.join(name)
        bench.started(name, runs(bench)[name])
        bench.wait(3.0, alive=False)
        if returns and number == 0:
            bench.join(name)
            bench.receive(Goodbye(**bench._signed(name), reason="enough"))
    assert bench.view(request).state is (JobState.ENCODER_WAITING if returns else JobState.FAILED)


def test_a_request_that_came_after_the_last_word_of_an_instance_is_not_what_silenced_it() -> None:
    """Symptom: a cut of the network silenced two instances; the request of the first was given to the second before
    that one was missed too, and failed as poison though nobody had died."""
    bench = Bench()
    bench.join("encoder-0")
    request = bench.submit("r")
    bench.started("encoder-0", lease(request, E))
    bench.wait(0.4, alive=False)
    bench.join("encoder-1")  # the last that is heard of it
    bench.wait(2.2, alive=False)
    assert runs(bench) == {"encoder-1": lease(request, E, 2)}
    bench.wait(0.5, alive=False)
    assert not bench.router.instances()
    assert bench.view(request).state is JobState.ENCODER_WAITING
    bench.join("encoder-1")
    assert runs(bench) == {"encoder-1": lease(request, E, 3)}


def test_instances_that_say_nothing_once_they_have_a_request_are_not_given_it_for_ever() -> None:
    bench = Bench(max_attempts=3)
    request = bench.submit("r")
    for number in range(3):
        bench.join(f"encoder-{number}")
        bench.wait(3.0, alive=False)
    error = bench.view(request).error
    assert error is not None
    assert error.code == "attempts_exhausted"


def test_two_requests_that_an_instance_died_of_never_share_the_next_one() -> None:
    bench = Bench()
    bench.join("encoder-0", slots=2)
    poison, bystander = bench.submit("poison"), bench.submit("bystander")
    for request in (poison, bystander):
        bench.started("encoder-0", lease(request, E))
    bench.feed(InstanceExited(instance=InstanceId("encoder-0")))
    bench.join("encoder-1", slots=2)
    assert runs(bench) == {"encoder-1": lease(poison, E, 2)}
    bench.submit("stranger")
    assert [message.lease.request for message in bench.sent("encoder-1", RunStage)] == ["stranger"]
    bench.started("encoder-1", lease(poison, E, 2))
    bench.feed(InstanceExited(instance=InstanceId("encoder-1")))
    assert bench.view(poison).state is JobState.FAILED
    bench.join("encoder-2", slots=2)
    bench.started("encoder-2", lease(bystander, E, 2))
    bench.staged("encoder-2", lease(bystander, E, 2))
    assert bench.view(bystander).state is JobState.DENOISING_WAITING
