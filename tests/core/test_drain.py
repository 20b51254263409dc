"""What an instance does about checkpoints, about copies of others, and when it is asked to stop."""

from __future__ import annotations

from triptych.core.events import Tick
from triptych.core.instance_events import (
    Abort,
    CheckpointMade,
    CopyKept,
    Ended,
    Halt,
    KeepCopy,
    Pulled,
    ReleaseCopies,
    Report,
    Say,
    StartPull,
    Stop,
    Suspend,
)
from triptych.ids import CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import (
    Ack,
    Cancel,
    Checkpointed,
    Draining,
    DrainStatus,
    Goodbye,
    Heartbeat,
    Keep,
    Kept,
    Lease,
    Release,
    Stopped,
)

from .harness import manifest
from .test_instance import FIRST, INPUT, Bench

SAVED = manifest("saved", FIRST.request, "denoiser")
THEIRS = manifest("theirs", RequestId("s"), "denoiser-2")


def made(bench: Bench, step: int = 3) -> None:
    bench.feed(CheckpointMade(lease=FIRST, manifest=SAVED, step=step, steps=9))


def stopped(*, checkpoint: bool) -> Stopped:
    values = {"checkpoint": SAVED, "step": 3, "steps": 9} if checkpoint else {}
    return Stopped(instance=InstanceId("denoiser"), epoch=Epoch("denoiser/1"), server_epoch=None, lease=FIRST, **values)  # type: ignore[arg-type]


def said(bench: Bench) -> list[type]:
    return [type(action.message) for action in bench.out if isinstance(action, Say)]


def listed(bench: Bench) -> tuple[CopyId, ...]:
    """Copies that the next heartbeat names."""
    bench.now += 1.0
    bench.feed(Tick())
    (beat,) = [a.message for a in bench.out if isinstance(a, Say) and isinstance(a.message, Heartbeat)]
    return beat.copies


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_told_to_the_server_and_freed_when_it_says_so() -> None:
    bench = Bench()
    bench.compute()
    made(bench)
    (report,) = [a for a in bench.out if isinstance(a, Report)]
    message = report.message
    assert isinstance(message, Checkpointed)
    assert (message.lease, message.manifest, message.step, message.steps) == (FIRST, SAVED, 3, 9)
    assert listed(bench) == ("saved",)
    bench.hear(Release, copies=(CopyId("saved"),))
    assert bench.out == [ReleaseCopies(copies=(CopyId("saved"),))]
    assert listed(bench) == ()


def test_a_checkpoint_of_a_lease_that_is_over_is_freed_at_once() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    made(bench)
    assert bench.out == [ReleaseCopies(copies=(CopyId("saved"),))]


def test_a_checkpoint_to_go_on_from_is_pulled_with_the_inputs() -> None:
    bench = Bench()
    bench.run(resume=SAVED)
    assert bench.out == [StartPull(lease=FIRST, inputs=(INPUT,), resume=SAVED)]


def test_a_copy_of_another_instance_is_kept_and_answered_for() -> None:
    bench = Bench()
    bench.hear(Keep, manifest=THEIRS, spare=True)
    assert bench.out == [KeepCopy(manifest=THEIRS, spare=True)]
    mine = manifest("mine", THEIRS.request, "denoiser")
    bench.feed(CopyKept(copy=THEIRS.copy, manifest=mine))
    (say,) = [a for a in bench.out if isinstance(a, Say)]
    assert isinstance(say.message, Kept)
    assert (say.message.copy, say.message.manifest) == ("theirs", mine)
    assert listed(bench) == ("mine",)


# -- being stopped between two steps ---------------------------------------------------------------------------------


def test_a_lease_that_computes_is_suspended_and_its_checkpoint_is_an_outcome() -> None:
    bench = Bench()
    bench.compute()
    bench.hear(Cancel, lease=FIRST, keep=True)
    assert bench.out == [Suspend(lease=FIRST)]
    bench.hear(Cancel, lease=FIRST, keep=True)
    assert bench.out == []
    bench.feed(Ended(outcome=stopped(checkpoint=True)))
    (report,) = [a for a in bench.out if isinstance(a, Report)]
    assert isinstance(report.message, Stopped)
    assert report.message.checkpoint == SAVED
    assert listed(bench) == ()  # not before the outcome is acknowledged
    bench.hear(Ack, leases=(FIRST,))
    assert listed(bench) == ("saved",)


def test_a_lease_whose_inputs_are_on_their_way_is_simply_stopped() -> None:
    bench = Bench()
    bench.run()
    bench.hear(Cancel, lease=FIRST, keep=True)
    assert bench.out == [Abort(lease=FIRST)]


def test_a_suspended_lease_can_still_be_cancelled_or_finish() -> None:
    bench = Bench()
    bench.compute()
    bench.hear(Cancel, lease=FIRST, keep=True)
    bench.hear(Cancel, lease=FIRST)
    assert bench.out == [Abort(lease=FIRST)]
    bench.feed(Ended(outcome=bench.staged()))
    assert isinstance([a for a in bench.out if isinstance(a, Report)][-1].message, type(bench.staged()))


# -- leaving ---------------------------------------------------------------------------------------------------------


def answer(bench: Bench, *, needed: bool) -> None:
    bench.hear(DrainStatus, needed=needed)


def test_an_idle_instance_leaves_at_once() -> None:
    bench = Bench()
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    assert said(bench) == [Goodbye]
    assert bench.out[-1] == Halt()


def test_an_instance_that_was_never_welcomed_leaves_at_once() -> None:
    bench = Bench(welcome=False)
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    assert bench.out[-1] == Halt()


def test_without_time_to_drain_it_leaves_with_work_in_hand() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stop(reason="SIGTERM", seconds=0.0))
    assert bench.out[-1] == Halt()


def test_a_busy_instance_says_that_it_drains_finishes_and_leaves_when_it_is_not_needed() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    assert said(bench) == [Draining]
    answer(bench, needed=True)
    bench.now += 1.0
    bench.feed(Tick())
    assert said(bench) == [Heartbeat, Draining]
    answer(bench, needed=True)
    bench.feed(Ended(outcome=bench.staged()))
    bench.hear(Ack, leases=(FIRST,))
    assert not said(bench)  # somebody has yet to read what it made
    answer(bench, needed=False)
    assert said(bench) == [Goodbye]
    assert bench.out[-1] == Halt()


def test_what_still_runs_shortly_before_the_end_is_handed_over() -> None:
    bench = Bench()
    bench.compute()
    waiting = Lease(RequestId("s"), Role.DENOISER, 1)
    bench.run(waiting)
    bench.feed(Pulled(lease=waiting, seconds=0.1, nbytes=1, plane="shm"))
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    begun = bench.now
    suspended: list[object] = []
    while not suspended:
        assert bench.now < begun + 30.0
        answer(bench, needed=True)
        bench.now = bench.machine.next_deadline(bench.now)
        bench.feed(Tick())
        suspended = [action for action in bench.out if isinstance(action, Suspend)]
    assert suspended == [Suspend(lease=FIRST), Suspend(lease=waiting)]
    assert 20.0 < bench.now - begun < 30.0


def test_it_leaves_at_the_end_of_its_time_whatever_is_needed() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stop(reason="SIGTERM", seconds=4.0))
    end = bench.now + 4.0
    while bench.now < end:
        answer(bench, needed=True)
        bench.now = min(end, bench.machine.next_deadline(bench.now))
        bench.feed(Tick())
    assert bench.out[-1] == Halt()


def test_it_does_not_wait_for_a_server_that_is_gone() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    end = bench.now + 3.0
    while bench.out[-1:] != [Halt()]:
        bench.now = bench.machine.next_deadline(bench.now)
        assert bench.now < end
        bench.feed(Tick())


def test_being_asked_again_changes_nothing_and_a_dead_thread_ends_the_waiting() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    assert bench.out == []
    bench.feed(Stop(reason="the compute thread died", failed=True))
    assert said(bench) == [Goodbye]
    assert bench.out[-1] == Halt()
