"""Checkpoints and what a leaving instance keeps: who keeps them, when they are let go, and what goes on from them."""

from __future__ import annotations

from triptych.core.events import InstanceExited, JobState
from triptych.ids import ROLES, CopyId, InstanceId, RequestId
from triptych.wire.messages import Checkpointed, Dropped, Keep, Kept, Lease, Release, RunStage

from .harness import Bench, manifest

E, D, V = ROLES


def running(*denoisers: str, **fields: str) -> tuple[Bench, RequestId, Lease]:
    """A request that is being denoised by the first of ``denoisers``, with encoder and decoder on the same host."""
    bench = Bench()
    for name in ("encoder", "decoder", *denoisers):
        bench.join(name, **({"fingerprint": fields[name]} if name in fields else {}))
    request = bench.submit("r")
    bench.encode(request)
    lease = Lease(request, D, 1)
    bench.fetched(denoisers[0], lease)
    bench.started(denoisers[0], lease)
    return bench, request, lease


def checkpointed(bench: Bench, name: str, lease: Lease, step: int, steps: int = 10) -> None:
    copy = manifest(f"c{step}", lease.request, name, life=bench.lives[name])
    bench.receive(Checkpointed(**bench._signed(name), lease=lease, manifest=copy, step=step, steps=steps))


def kept(bench: Bench, name: str, keep: Keep) -> CopyId:
    """The instance answers that it has a copy of its own; the id of that."""
    mine = manifest(f"{keep.manifest.copy}@{name}", keep.manifest.request, name, life=bench.lives[name])
    bench.receive(Kept(**bench._signed(name), copy=keep.manifest.copy, manifest=mine))
    return mine.copy


def keep_at(bench: Bench, *names: str) -> tuple[str, Keep]:
    """The one instance that was just asked to keep something."""
    ((name, keep),) = [(name, keep) for name in names for keep in bench.sent(name, Keep)]
    return name, keep


def released(bench: Bench, name: str) -> list[str]:
    return [copy for release in bench.sent(name, Release) for copy in release.copies]


def test_a_checkpoint_goes_to_another_instance_of_any_role_and_is_let_go_by_its_maker() -> None:
    bench, _, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    name, keep = keep_at(bench, "encoder", "decoder", "denoiser")
    assert name in ("encoder", "decoder")
    assert (keep.manifest.copy, keep.spare) == ("c3", True)
    kept(bench, name, keep)
    assert released(bench, "denoiser") == ["c3"]


def test_another_host_is_preferred_for_keeping() -> None:
    bench, _, lease = running("denoiser")
    bench.join("denoiser-2", D, host="another")
    checkpointed(bench, "denoiser", lease, 3)
    assert keep_at(bench, "encoder", "decoder", "denoiser-2")[0] == "denoiser-2"


def test_without_another_instance_the_maker_keeps_its_checkpoint() -> None:
    bench = Bench()
    bench.join("all", *ROLES)
    request = bench.submit("r")
    bench.encode(request, "all")
    lease = Lease(request, D, 1)
    bench.started("all", lease)
    checkpointed(bench, "all", lease, 3)
    assert not bench.sent("all", Keep)
    assert "c3" in bench.copies_at("all")


def test_a_newer_checkpoint_replaces_the_older_one_only_once_it_is_kept() -> None:
    bench, _, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    first, keep = keep_at(bench, "encoder", "decoder")
    old = kept(bench, first, keep)
    checkpointed(bench, "denoiser", lease, 6)
    assert not released(bench, first)
    second, keep = keep_at(bench, "encoder", "decoder")
    kept(bench, second, keep)
    assert old in released(bench, first)


def test_a_killed_denoiser_is_followed_by_one_that_goes_on_from_the_checkpoint() -> None:
    bench, request, lease = running("denoiser")
    bench.progress("denoiser", lease, 3)
    checkpointed(bench, "denoiser", lease, 3)
    name, keep = keep_at(bench, "encoder", "decoder")
    mine = kept(bench, name, keep)
    bench.progress("denoiser", lease, 5)
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    view = bench.view(request)
    assert (view.state, view.step, view.steps) == (JobState.DENOISING_WAITING, 3, 10)
    bench.join("denoiser", life=2)
    run = bench.run("denoiser")
    assert run.resume is not None
    assert run.resume.copy == mine
    again = Lease(request, D, 2)
    bench.fetched("denoiser", again)
    bench.started("denoiser", again)
    bench.progress("denoiser", again, 4)
    assert (bench.view(request).step, bench.view(request).resumed_from_step) == (4, 3)
    bench.staged("denoiser", again)
    assert mine in released(bench, name)
    bench.decode(request, attempt=2)
    assert (bench.view(request).state, bench.view(request).resumed_from_step) == (JobState.DONE, 3)


def test_a_checkpoint_that_was_kept_just_before_its_maker_died_counts() -> None:
    bench, _, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    name, keep = keep_at(bench, "encoder", "decoder")
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    mine = kept(bench, name, keep)
    bench.join("denoiser", life=2)
    resume = bench.run("denoiser").resume
    assert resume is not None
    assert resume.copy == mine


def test_what_nobody_will_need_is_not_kept_any_more() -> None:
    bench, request, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    first, _ = keep_at(bench, "encoder", "decoder")
    checkpointed(bench, "denoiser", lease, 6)
    assert released(bench, first) == ["c3"]
    second, _ = keep_at(bench, "encoder", "decoder")
    bench.staged("denoiser", lease)
    assert "c6" in released(bench, second)

    bench, request, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    buddy, _ = keep_at(bench, "encoder", "decoder")
    bench.cancel(request)
    assert "c3" in released(bench, buddy)


def test_what_is_being_kept_stays_wanted_when_its_maker_dies_or_drops_it() -> None:
    bench, _, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    name, keep = keep_at(bench, "encoder", "decoder")
    bench.receive(Dropped(**bench._signed("denoiser"), copies=(CopyId("c3"),)))
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    assert not released(bench, name)
    assert kept(bench, name, keep) in bench.copies_at(name)


def test_an_instance_that_computes_otherwise_begins_anew_and_says_so() -> None:
    bench, request, lease = running("denoiser", denoiser="one")
    checkpointed(bench, "denoiser", lease, 3)
    kept(bench, *keep_at(bench, "encoder", "decoder"))
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    bench.join("denoiser", life=2, fingerprint="another")
    assert bench.run("denoiser").resume is None
    assert (bench.view(request).resumed_from_step, bench.router.view(request).step) == (0, 0)  # type: ignore[union-attr]


def test_of_several_denoisers_one_that_can_go_on_is_preferred() -> None:
    bench, _, lease = running("denoiser", denoiser="one")
    bench.join("denoiser-2", D, fingerprint="another")
    bench.join("denoiser-3", D, fingerprint="one")
    checkpointed(bench, "denoiser", lease, 3)
    kept(bench, *keep_at(bench, "encoder", "decoder", "denoiser-2", "denoiser-3"))
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    assert bench.run("denoiser-3").resume is not None


def test_a_checkpoint_of_what_another_encoder_made_otherwise_is_not_used() -> None:
    bench, request, lease = running("denoiser", encoder="one")
    checkpointed(bench, "denoiser", lease, 3)
    name, keep = keep_at(bench, "encoder", "decoder")
    kept(bench, name, keep)
    bench.join("decoder-2")
    for victim in ("denoiser", "encoder"):
        bench.feed(InstanceExited(instance=InstanceId(victim)))
    bench.join("encoder", life=2, fingerprint="another")
    attempt = bench.run("encoder").lease.attempt
    bench.encode(request, attempt=attempt)
    bench.join("denoiser", life=2)
    assert bench.run("denoiser").resume is None


def test_a_checkpoint_that_cannot_be_pulled_is_given_up_without_blame() -> None:
    bench, request, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    mine = kept(bench, *keep_at(bench, "encoder", "decoder"))
    bench.feed(InstanceExited(instance=InstanceId("denoiser")))
    bench.join("denoiser", life=2)
    bench.failed("denoiser", Lease(request, D, 2), mine)
    run = bench.run("denoiser")
    assert (run.lease.attempt, run.resume) == (3, None)
    assert bench.view(request).step == 0


def test_a_dropped_checkpoint_costs_nothing_but_itself() -> None:
    bench, request, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    bench.receive(Dropped(**bench._signed("denoiser"), copies=(CopyId("c3"),)))
    assert bench.counted("checkpoint_lost") == 1
    assert not bench.counted("requeued")
    assert bench.view(request).state is JobState.DENOISING_RUNNING


def test_checkpoints_do_not_keep_an_instance_from_new_work() -> None:
    bench, _, lease = running("denoiser")
    bench.join("small", D, pool_bytes=100, slots=2)
    checkpointed(bench, "denoiser", lease, 3)
    kept(bench, "small", Keep(server_epoch=bench.router._ledger.server_epoch, epoch=bench._signed("small")["epoch"],
                              manifest=manifest("c3", lease.request, "denoiser"), spare=True))  # fmt: skip
    other = bench.submit("s")
    bench.encode(other)
    assert bench.sent("small", RunStage)


def test_words_about_checkpoints_that_come_late_or_twice_only_free_memory() -> None:
    bench, request, lease = running("denoiser")
    checkpointed(bench, "denoiser", lease, 3)
    name, keep = keep_at(bench, "encoder", "decoder")
    checkpointed(bench, "denoiser", lease, 3)
    assert not bench.out
    mine = kept(bench, name, keep)
    kept(bench, name, keep)
    assert not bench.out
    checkpointed(bench, "denoiser", lease, 2)
    bench.staged("denoiser", lease)
    assert mine in released(bench, name)
    kept(bench, "decoder", keep)
    assert released(bench, "decoder") == ["c3@decoder"]
    checkpointed(bench, "denoiser", lease, 4)
    assert released(bench, "denoiser") == ["c4"]
    bench.decode(request)
    assert all(not bench.copies_at(name) for name in ("encoder", "denoiser", "decoder"))


def test_nonsense_steps_are_not_booked() -> None:
    bench, _, lease = running("denoiser")
    for step in (0, 10, -1):
        checkpointed(bench, "denoiser", lease, step)
        assert released(bench, "denoiser") == [f"c{step}"]
