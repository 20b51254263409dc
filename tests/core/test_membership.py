from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from triptych.core.events import (
    CancelRequest,
    Connect,
    Count,
    Disconnect,
    InstanceExited,
    JobState,
    SendMember,
    SendWork,
    Tick,
)
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Goodbye,
    Heartbeat,
    Lease,
    Refused,
    Release,
    RunStage,
    Unknown,
    Welcome,
)
from triptych.wire.schema import Param, RequestSchema

from .harness import SCHEMA, SERVER, URLS, Bench, hello, manifest

E, D, V = ROLES


def lease(request: RequestId, role: Role, attempt: int = 1) -> Lease:
    return Lease(request, role, attempt)


def goodbye(name: str, life: int = 1) -> Goodbye:
    return Goodbye(
        instance=InstanceId(name), epoch=Epoch(f"{name}/{life}"), server_epoch=SERVER, reason="asked to stop"
    )


# -- joining ------------------------------------------------------------------------------------------------------


def test_a_hello_is_welcomed_with_ports_and_pace() -> None:
    bench = Bench(heartbeat_interval=0.25)
    bench.join("encoder")
    (welcome,) = bench.sent("encoder", Welcome)
    assert (welcome.server_epoch, welcome.epoch) == (SERVER, "encoder/1")
    assert (welcome.result_urls, welcome.heartbeat_interval) == (URLS, 0.25)


def test_another_protocol_version_is_refused() -> None:
    bench = Bench()
    bench.join("encoder", protocol=99)
    (refused,) = bench.sent("encoder", Refused)
    assert refused.reason == f"protocol=99: this server speaks version {PROTOCOL_VERSION}"
    assert bench.router.instances() == ()


def test_a_model_is_the_same_wherever_its_folder_lies_and_however_that_is_spelled() -> None:
    """Symptom: after an encoder of /data/wan, a denoiser of /data/wan/ or of another mount point was refused."""
    bench = Bench()
    bench.join("encoder", schema=replace(SCHEMA, model="/data/wan"))
    for life, path in enumerate(("/data/wan/", "./wan", "wan", "/mnt/models/wan", "owner/wan"), 1):
        bench.join("denoiser", life=life, schema=replace(SCHEMA, model=path))
        assert not bench.sent("denoiser", Refused)
    bench.join("decoder", schema=replace(SCHEMA, model="/data/other"))
    (refused,) = bench.sent("decoder", Refused)
    assert refused.reason == "model='/data/other': the others serve '/data/wan'"
    bench.join("encoder", life=2, schema=replace(SCHEMA, model="wan/"))
    assert bench.router.schema is not None
    assert bench.router.schema.model == "/data/wan", "clients know it by that name"


def test_another_model_is_refused_with_both_names() -> None:
    bench = Bench()
    bench.join("encoder")
    other = type(SCHEMA)(model="other", pipeline="P", split="modular", task="t", output="video", params=())
    bench.join("denoiser", schema=other)
    (refused,) = bench.sent("denoiser", Refused)
    assert refused.reason == "model='other': the others serve 'm'"
    assert bench.router.missing_roles()[D] == f"denoiser was refused: {refused.reason}"
    assert list(bench.router.refused().values()) == [refused.reason]
    bench.receive(goodbye("encoder"))
    bench.join("denoiser", schema=other)
    assert bench.sent("denoiser", Welcome), "nobody serves the first model any more"
    assert bench.router.refused() == {}
    assert bench.router.schema is None
    bench.join("encoder", life=2, schema=other)
    assert bench.router.schema == other


def test_a_server_for_one_model_refuses_instances_of_another() -> None:
    bench = Bench(model="some/path/m")
    bench.join("encoder")
    assert bench.sent("encoder", Welcome), "the last part of a path or Hub id is a model's name"
    bench.receive(goodbye("encoder"))
    bench.join("denoiser", schema=replace(SCHEMA, model="other"))
    (refused,) = bench.sent("denoiser", Refused)
    assert refused.reason == "model='other': this server is for 'some/path/m'"


def test_a_stray_that_is_there_first_keeps_the_others_out_only_while_it_is_there() -> None:
    """Symptom: every instance of a group ended, and the group with them, when another's instance met its restarted
    server first."""
    bench = Bench()
    bench.join("stray", E, schema=replace(SCHEMA, model="other"))
    for name in ("encoder", "denoiser", "decoder"):
        bench.join(name)
        assert [refused.passing for refused in bench.sent(name, Refused)] == [True]
    bench.receive(goodbye("stray"))
    for name in ("encoder", "denoiser", "decoder"):
        bench.join(name)
        assert bench.sent(name, Welcome)


def test_a_refusal_is_told_once_however_often_the_instance_asks() -> None:
    bench = Bench()
    bench.join("encoder")
    told: list[int] = []
    for _ in range(3):
        bench.join("denoiser", schema=replace(SCHEMA, model="other"))
        assert bench.sent("denoiser", Refused)
        told.append(sum(count.name == "instance_refused" for count in bench.all(Count)))
    assert told == [1, 0, 0]


@pytest.mark.parametrize("fields", [{"protocol": 99}, {"slots": 0}, {"work_url": "x"}, {"schema": SCHEMA}])
def test_what_is_wrong_with_an_instance_itself_does_not_pass(fields: dict[str, Any]) -> None:
    bench = Bench(model="other")
    bench.join("encoder", **({"schema": replace(SCHEMA, model="other")} | fields))
    (refused,) = bench.sent("encoder", Refused)
    assert not refused.passing


def test_the_encoder_s_defaults_are_those_that_apply() -> None:
    def steps(default: int | None) -> RequestSchema:
        return replace(SCHEMA, params=(Param(name="num_inference_steps", type="integer", default=default),))

    bench = Bench()
    bench.join("decoder", schema=steps(50))
    assert bench.router.schema is None, "nobody knows the defaults yet"
    bench.join("encoder", schema=steps(20))
    bench.join("denoiser", schema=steps(None))
    assert bench.router.schema == steps(20)
    bench.join("encoder-1", schema=steps(21))
    (refused,) = bench.sent("encoder-1", Refused)
    assert "with other request parameters" in refused.reason


def test_a_hello_without_roles_or_slots_is_refused() -> None:
    bench = Bench()
    bench.join("encoder", slots=0)
    assert bench.sent("encoder", Refused)


def test_a_repeated_hello_is_welcomed_again_and_changes_nothing() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.receive(hello("encoder", leases=(lease(request, E),)))
    assert [type(action.message) for action in bench.out if isinstance(action, SendMember | SendWork)] == [Welcome]
    assert len(bench.router.instances()) == 1
    bench.encode(request)
    assert bench.view(request).state is JobState.DENOISING_WAITING


def test_a_new_life_replaces_the_old_one_and_its_work_goes_back() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.started("encoder", lease(request, E))
    bench.join("encoder", life=2)
    assert bench.counted("instance_lost") == 1
    assert bench.run("encoder").lease == lease(request, E, 2)
    assert bench.run("encoder").epoch == "encoder/2"


def test_a_late_hello_of_an_old_life_does_not_displace_the_new_one() -> None:
    bench = Bench()
    bench.join("encoder")
    bench.join("encoder", life=2)
    bench.receive(hello("encoder", life=1))
    assert bench.counted("stale_message") == 1
    assert [view.epoch for view in bench.router.instances()] == ["encoder/2"]


def test_an_early_life_that_is_heard_of_too_late_cannot_lock_the_present_one_out() -> None:
    bench = Bench()
    bench.join("encoder", life=2)
    bench.receive(hello("encoder", life=1))
    assert [view.epoch for view in bench.router.instances()] == ["encoder/1"], "who can tell"
    bench.wait(3.0, alive=False)
    bench.beat("encoder")
    assert bench.sent("encoder", Unknown)
    bench.join("encoder", life=2)
    assert [view.epoch for view in bench.router.instances()] == ["encoder/2"]


def test_a_life_that_has_said_goodbye_is_never_let_in_again() -> None:
    bench = Bench()
    bench.join("encoder")
    bench.receive(goodbye("encoder"))
    bench.receive(hello("encoder"))
    assert bench.router.instances() == ()


def test_an_address_spelled_differently_is_the_same_instance() -> None:
    bench = Bench()
    bench.join("encoder", work_url="tcp://127.0.0.1:19000")
    bench.join("encoder", life=2, work_url="tcp://localhost:19000")
    request = bench.submit("r")
    assert len(bench.router.instances()) == 1
    (send,) = [action for action in bench.out if isinstance(action, SendWork)]
    assert send.work_url == "tcp://localhost:19000"
    bench.encode(request)
    assert bench.view(request).state is JobState.DENOISING_WAITING


@pytest.mark.parametrize("url", ["tcp://::1:5555", "tcp://host", "nonsense"])
def test_an_instance_at_an_address_that_nobody_can_read_is_refused(url: str) -> None:
    """Symptom: such an instance was let in, and every request hung with it until its timeout."""
    bench = Bench()
    bench.receive(hello("encoder", work_url=url))
    assert bench.router.instances() == ()
    (refused,) = bench.sent("encoder", Refused)
    assert repr(url) in refused.reason


def test_what_a_stranger_still_holds_is_stopped_and_released() -> None:
    bench = Bench()
    old = lease(RequestId("of an earlier server"), E)
    bench.join("encoder", leases=(old,), copies=(manifest("c", old.request, "encoder"),))
    assert [cancel.lease for cancel in bench.sent("encoder", Cancel)] == [old]
    assert [release.copies for release in bench.sent("encoder", Release)] == [("c",)]


def test_a_lease_of_an_earlier_server_life_is_never_granted_again() -> None:
    bench = Bench()
    request = bench.submit("r")
    bench.join("encoder", E, D, leases=(lease(request, D, 3),))
    assert [cancel.lease for cancel in bench.sent("encoder", Cancel)] == [lease(request, D, 3)]
    assert bench.run("encoder").lease == lease(request, E, 4)


def test_unequal_fingerprints_are_counted() -> None:
    bench = Bench()
    bench.join("denoiser-0")
    bench.join("denoiser-1", fingerprint="g")
    assert bench.counted("fingerprint_differs") == 1


def test_a_commit_beside_another_is_counted_and_named() -> None:
    bench = Bench()
    bench.join("encoder", schema=replace(SCHEMA, commit="a" * 40))
    bench.join("decoder")
    bench.join("denoiser-0", schema=replace(SCHEMA, commit="a" * 40))
    assert bench.counted("revision_differs") == 0
    bench.join("denoiser-1", schema=replace(SCHEMA, commit="b" * 40))
    assert bench.sent("denoiser-1", Welcome), "most commits change no weights"
    (count,) = [count for count in bench.all(Count) if count.name == "revision_differs"]
    assert count.detail == (
        f"model at commit {'b' * 40} beside {'a' * 40} of denoiser-0: launch all with the same --revision"
    )


# -- heartbeats ---------------------------------------------------------------------------------------------------


def test_a_stranger_is_asked_to_say_hello() -> None:
    bench = Bench()
    bench.beat("encoder")
    (unknown,) = bench.sent("encoder", Unknown)
    assert unknown.epoch == "encoder/1"


def test_a_heartbeat_for_an_earlier_server_life_is_answered_with_unknown() -> None:
    bench = Bench()
    bench.join("encoder")
    beat = Heartbeat(
        instance=hello("encoder").instance,
        epoch=Epoch("encoder/1"),
        server_epoch=Epoch("server-0"),
        sequence=7,
        leases=(),
        pool_used=0,
        resident_bytes=0,
    )
    bench.receive(beat)
    assert bench.sent("encoder", Unknown)


def test_figures_of_the_heartbeat_are_shown() -> None:
    bench = Bench()
    bench.join("encoder", E, D, slots=3, pool_bytes=4096)
    bench.beat("encoder", pool_used=17, resident_bytes=18, device_bytes=19)
    bench.now += 0.5
    bench.feed(Tick())
    (view,) = bench.router.instances()
    assert (view.instance, view.roles, view.slots, view.free_slots) == ("encoder", (E, D), 3, 3)
    assert (view.pool_bytes, view.pool_used, view.resident_bytes, view.device_bytes) == (4096, 17, 18, 19)
    assert view.heartbeat_age == 0.5


def test_an_overtaken_heartbeat_is_ignored() -> None:
    bench = Bench()
    bench.join("encoder")
    bench.beat("encoder", sequence=9, pool_used=5)
    bench.beat("encoder", sequence=8, pool_used=4)
    assert bench.counted("stale_message") == 1
    assert bench.router.instances()[0].pool_used == 5


def test_a_lease_lost_on_the_way_is_granted_again_after_two_heartbeats_without_it() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.now += 0.6
    bench.beat("encoder")
    bench.now += 0.6
    bench.beat("encoder")
    assert not bench.sent("encoder", RunStage), "one heartbeat may have crossed the grant"
    bench.now += 0.5
    bench.beat("encoder")
    assert bench.counted("lease_lost") == 1
    assert bench.run("encoder").lease == lease(request, E, 2)


def test_a_lease_that_is_listed_is_left_alone() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.wait(20.0)
    bench.encode(request)
    assert bench.view(request).attempt == 1


def test_a_lease_that_nobody_granted_is_stopped() -> None:
    bench = Bench()
    bench.join("encoder")
    ghost = lease(RequestId("ghost"), E)
    bench.beat("encoder", (ghost,))
    assert not bench.sent("encoder", Cancel), "its end may be on the way"
    bench.beat("encoder", (ghost,))
    assert [cancel.lease for cancel in bench.sent("encoder", Cancel)] == [ghost]


def test_a_lost_cancel_is_repeated() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.feed(CancelRequest(request=request))
    bench.beat("encoder", (lease(request, E),))
    assert bench.sent("encoder", Cancel)


def test_a_slot_comes_back_although_the_answer_to_a_cancel_is_lost() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.feed(CancelRequest(request=request))
    for _ in range(4):
        bench.now += 0.6
        bench.beat("encoder")
    assert bench.router.instances()[0].free_slots == 1


def test_a_copy_that_is_no_longer_listed_is_made_anew() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.encode(request)
    for _ in range(3):
        bench.now += 0.6
        bench.beat("encoder", copies=())
    assert bench.run("encoder").lease == lease(request, E, 2)


def test_a_copy_whose_outcome_is_not_acknowledged_yet_counts_as_listed() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.encode(request)
    for _ in range(6):
        bench.now += 0.6
        bench.beat("encoder", (lease(request, E),), copies=())
    assert not bench.sent("encoder", RunStage)
    assert bench.copies_at("encoder") == ["r/encoder.1"]


def test_a_copy_that_nobody_will_read_is_released_again() -> None:
    bench = Bench()
    bench.join("encoder")
    for _ in range(2):
        bench.beat("encoder", copies=(CopyId("stray"),))
    assert [release.copies for release in bench.sent("encoder", Release)] == [("stray",)]


# -- leaving ------------------------------------------------------------------------------------------------------


def test_who_leaves_in_good_order_is_not_counted_as_lost() -> None:
    bench = Bench()
    bench.join("encoder")
    bench.receive(goodbye("encoder"))
    assert (bench.counted("instance_left"), bench.counted("instance_lost")) == (1, 0)


def test_silence_loses_an_instance() -> None:
    bench = Bench(lease_timeout=2.5)
    bench.pool()
    request = bench.submit("r")
    bench.started("encoder", lease(request, E))
    bench.wait(2.4, alive=False)
    assert len(bench.router.instances()) == 3
    bench.wait(0.2, alive=False)
    assert bench.router.instances() == ()
    assert {action.instance for action in bench.all(Disconnect)} == {"encoder", "denoiser", "decoder"}
    assert bench.counted("instance_lost") == 3
    assert bench.view(request).state is JobState.ENCODER_WAITING
    assert bench.router.missing_roles()[E].startswith("encoder: silent for 2.")


def test_an_instance_that_was_only_silent_may_come_back_with_the_same_life() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.started("encoder", lease(request, E))
    bench.wait(3.0, alive=False)
    bench.beat("encoder", (lease(request, E),))
    assert bench.sent("encoder", Unknown)
    bench.join("encoder", leases=(lease(request, E),))
    assert [cancel.lease for cancel in bench.sent("encoder", Cancel)] == [lease(request, E)]
    assert bench.run("encoder").lease == lease(request, E, 2)


def test_a_server_that_stood_still_does_not_blame_its_instances() -> None:
    bench = Bench()
    bench.pool()
    bench.now += 60.0
    bench.feed(Tick())
    assert len(bench.router.instances()) == 3
    bench.wait(2.6, alive=False)
    assert bench.router.instances() == ()


def test_a_goodbye_sends_the_work_elsewhere_at_once() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    request = bench.submit("r")
    bench.receive(goodbye("encoder-0"))
    assert bench.run("encoder-1").lease == lease(request, E, 2)


def test_a_goodbye_is_never_held_against_a_request() -> None:
    bench = Bench(max_attempts=2)
    request = bench.submit("r")
    for life in range(1, 6):
        bench.join("encoder", life=life)
        bench.started("encoder", lease(request, E, life))
        bench.receive(goodbye("encoder", life))
    assert bench.view(request).state is JobState.ENCODER_WAITING


def test_a_process_known_to_have_exited_is_lost_without_waiting() -> None:
    bench = Bench()
    bench.join("encoder-0")
    bench.join("encoder-1")
    request = bench.submit("r")
    bench.feed(InstanceExited(instance=hello("encoder-0").instance))
    assert bench.run("encoder-1").lease == lease(request, E, 2)
    bench.feed(InstanceExited(instance=hello("encoder-0").instance))
    assert bench.out == []


def test_an_instance_that_was_taken_for_dead_is_welcome_again_and_its_request_is_not_held_against_it() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.started("encoder", lease(request, E))
    bench.feed(InstanceExited(instance=hello("encoder").instance))
    assert bench.sent("encoder", Unknown) == []
    bench.beat("encoder", (lease(request, E),))
    assert len(bench.sent("encoder", Unknown)) == 1
    bench.join("encoder")
    assert len(bench.all(Connect)) == 1
    assert bench.run("encoder").lease == lease(request, E, 2)
    bench.encode(request, "encoder", attempt=2)


def test_a_request_that_kills_every_instance_ends_with_evidence() -> None:
    bench = Bench(max_attempts=2)
    bench.join("encoder-0", slots=2)
    bench.join("encoder-1", slots=2)
    poison = bench.submit("poison")
    bystander = bench.submit("bystander")
    for attempt in (1, 2):
        (holder,) = [view for view in bench.router.instances() if lease(poison, E, attempt) in view.leases]
        bench.started(holder.instance, lease(poison, E, attempt))
        bench.feed(InstanceExited(instance=holder.instance))
    view = bench.view(poison)
    assert view.state is JobState.FAILED
    assert view.error is not None
    assert "attempt 1 on encoder-0: instance lost: process exited" in view.error.message
    assert "attempt 2 on encoder-1" in view.error.message
    assert bench.view(bystander).state is JobState.ENCODER_WAITING


def test_every_message_of_a_life_that_is_over_is_counted_and_ignored() -> None:
    bench = Bench()
    bench.join("encoder")
    request = bench.submit("r")
    bench.join("encoder", life=2)
    bench.lives["encoder"] = 1
    for say in (bench.started, bench.staged, bench.stopped, bench.failed):
        say("encoder", lease(request, E))
        assert [type(action) for action in bench.out] == [Count]
        assert bench.counted("stale_message") == 1
    bench.receive(goodbye("encoder"))
    assert bench.counted("stale_message") == 1
    assert [view.epoch for view in bench.router.instances()] == ["encoder/2"]
