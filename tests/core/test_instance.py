from __future__ import annotations

from typing import Any, TypeVar

import pytest

from triptych.core.events import Count, Tick
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import (
    Abort,
    ComputeStarted,
    ConnectResults,
    CopiesDropped,
    Ended,
    Forget,
    FromServer,
    Halt,
    InstanceAction,
    InstanceEvent,
    Pulled,
    PullFailed,
    ReleaseCopies,
    Report,
    Say,
    StartCompute,
    StartPull,
    Stepped,
    Stop,
    Usage,
)
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import (
    Ack,
    Cancel,
    Dropped,
    ErrorInfo,
    Fetched,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Output,
    Progress,
    Pull,
    Refused,
    Release,
    RunStage,
    Staged,
    StageFailed,
    Started,
    Stopped,
    ToInstance,
    Unknown,
    Welcome,
)

from .harness import FILE, SERVER, URLS, hello, manifest

E, D, V = ROLES
A = TypeVar("A", bound=InstanceAction)
M = TypeVar("M")

FIRST = Lease(RequestId("r"), D, 1)
INPUT = manifest("in", FIRST.request, "encoder")
OUTPUT = manifest("out", FIRST.request, "denoiser")


class Bench:
    """Feeds an instance machine of a denoiser and keeps what the last event caused."""

    def __init__(self, *, welcome: bool = True, **fields: Any) -> None:
        self.machine = InstanceMachine(hello("denoiser", D, **({"slots": 2} | fields)))
        self.now = 50.0
        self.server = SERVER
        self.out: list[InstanceAction] = []
        self.feed(Tick())
        if welcome:
            self.welcome()

    def feed(self, event: InstanceEvent) -> list[InstanceAction]:
        self.out = self.machine.handle(event, self.now)
        return self.out

    def hear(self, kind: type[ToInstance], blobs: tuple[bytes, ...] = (), **fields: Any) -> list[InstanceAction]:
        message = kind(**({"server_epoch": self.server, "epoch": Epoch("denoiser/1")} | fields))
        return self.feed(FromServer(message=message, blobs=blobs))

    def welcome(self, **fields: Any) -> list[InstanceAction]:
        return self.hear(Welcome, **({"result_urls": URLS, "heartbeat_interval": 0.5} | fields))

    def run(self, lease: Lease = FIRST, blobs: tuple[bytes, ...] = (), **fields: Any) -> list[InstanceAction]:
        values: dict[str, Any] = {"lease": lease, "params": {"seed": 1}, "inputs": (INPUT,), "budget_seconds": 9.0}
        return self.hear(RunStage, blobs, **(values | fields))

    def compute(self, lease: Lease = FIRST) -> None:
        """Bring a lease to the compute thread."""
        self.run(lease)
        self.feed(Pulled(lease=lease, seconds=0.25, nbytes=64, plane="shm"))
        self.feed(ComputeStarted(lease=lease))

    def staged(self, lease: Lease = FIRST) -> Staged:
        return Staged(
            instance=InstanceId("denoiser"),
            epoch=Epoch("denoiser/1"),
            server_epoch=None,
            lease=lease,
            outputs=(Output(consumer=V, manifest=OUTPUT),),
            compute_seconds=1.0,
            stage_seconds=0.0,
        )

    def stopped(self, lease: Lease = FIRST) -> Stopped:
        return Stopped(instance=InstanceId("denoiser"), epoch=Epoch("denoiser/1"), server_epoch=SERVER, lease=lease)

    def tick(self, seconds: float) -> list[InstanceAction]:
        """Let time pass with a tick at each deadline; returns all that it caused."""
        caused: list[InstanceAction] = []
        end = self.now + seconds
        while (due := max(self.now, self.machine.next_deadline(self.now))) <= end:
            self.now = due
            caused += self.feed(Tick())
        self.now = end
        self.out = caused
        return caused

    def all(self, kind: type[A]) -> list[A]:
        return [action for action in self.out if isinstance(action, kind)]

    def said(self, kind: type[M]) -> list[M]:
        return [say.message for say in self.all(Say) if isinstance(say.message, kind)]

    def reported(self, kind: type[M]) -> list[M]:
        return [report.message for report in self.all(Report) if isinstance(report.message, kind)]

    def counted(self) -> list[str]:
        return [count.name for count in self.all(Count)]


# -- membership ---------------------------------------------------------------------------------------------------


def test_says_hello_each_second_until_it_is_welcomed() -> None:
    bench = Bench(welcome=False)
    assert len(bench.said(Hello)) == 1
    bench.tick(3.5)
    assert len(bench.said(Hello)) == 3
    assert not bench.said(Heartbeat)
    bench.welcome()
    assert [action.urls for action in bench.all(ConnectResults)] == [URLS]
    assert len(bench.said(Heartbeat)) == 1
    bench.tick(3.0)
    assert not bench.said(Hello)


def test_heartbeats_come_at_the_pace_of_the_server_with_leases_and_figures() -> None:
    bench = Bench()
    bench.run()
    bench.feed(Usage(pool_used=1, resident_bytes=2, device_bytes=3))
    bench.tick(2.0)
    beats = bench.said(Heartbeat)
    assert len(beats) == 4
    assert [beat.sequence for beat in beats] == [2, 3, 4, 5]
    assert beats[0].leases == (FIRST,)
    assert (beats[0].pool_used, beats[0].resident_bytes, beats[0].device_bytes) == (1, 2, 3)
    assert beats[0].server_epoch == SERVER


def test_unknown_leads_to_a_hello_with_what_it_still_holds() -> None:
    bench = Bench()
    other = Lease(RequestId("s"), D, 2)
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    bench.run(other)
    bench.hear(Unknown)
    (again,) = bench.said(Hello)
    assert again.leases == (FIRST, other)
    assert again.copies == (OUTPUT,)
    assert again.server_epoch == SERVER


def test_a_second_unknown_for_the_same_gap_is_not_answered() -> None:
    bench = Bench()
    bench.hear(Unknown)
    bench.hear(Unknown)
    assert not bench.said(Hello)


def test_refusal_ends_the_process_with_the_reason() -> None:
    bench = Bench(welcome=False)
    bench.hear(Refused, reason="model='a': this server is for 'b'")
    (halt,) = bench.all(Halt)
    assert halt.error == "the server refused this instance: model='a': this server is for 'b'"
    assert bench.feed(Tick()) == []


def test_one_that_others_keep_out_holds_what_it_has_and_asks_until_they_are_gone() -> None:
    """Symptom: a stray instance that met a restarted server first made all the others exit, with what they held."""
    bench = Bench()
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    bench.server = Epoch("server-2")
    bench.hear(Unknown)
    bench.hear(Refused, reason="model='a': the others serve 'b'", passing=True)
    assert not bench.all(Halt)
    assert bench.machine.refusal == "model='a': the others serve 'b'"
    bench.tick(11.0)
    asked = bench.said(Hello)
    assert [hello.copies for hello in asked[:1]] == [(OUTPUT,)]
    bench.welcome()
    assert bench.reported(Staged)
    assert bench.machine.refusal == ""


def test_one_that_others_keep_out_leaves_at_once_when_it_is_asked_to() -> None:
    bench = Bench(welcome=False)
    bench.hear(Refused, reason="model='a': the others serve 'b'", passing=True)
    bench.feed(Stop(reason="SIGTERM", seconds=30.0))
    assert [halt.error for halt in bench.all(Halt)] == [None]


def test_stop_says_goodbye_and_halts_without_an_error() -> None:
    bench = Bench()
    bench.feed(Stop(reason="SIGTERM"))
    assert [goodbye.reason for goodbye in bench.said(Goodbye)] == ["SIGTERM"]
    assert [halt.error for halt in bench.all(Halt)] == [None]


def test_messages_for_another_life_are_ignored() -> None:
    bench = Bench(welcome=False)
    bench.welcome(epoch=Epoch("denoiser/0"))
    assert bench.counted() == ["stale_message"]
    assert not bench.machine.welcomed


def test_a_restarted_server_gets_the_results_of_the_work_in_hand() -> None:
    bench = Bench()
    bench.compute()
    bench.server = Epoch("server-2")
    bench.hear(Unknown)
    assert bench.said(Hello)
    bench.feed(Ended(outcome=bench.staged()))
    bench.welcome()
    assert [staged.server_epoch for staged in bench.reported(Staged)] == ["server-2"]
    assert bench.machine.server_epoch == "server-2"


def test_a_late_welcome_of_an_older_server_cannot_hold_an_instance_for_ever() -> None:
    bench = Bench()
    bench.server = Epoch("server-0")
    bench.welcome()
    assert bench.machine.server_epoch == SERVER, "it has been welcomed and asked for nothing"
    bench.server = SERVER
    bench.hear(Unknown)
    bench.server = Epoch("server-0")
    bench.welcome()
    assert bench.machine.server_epoch == "server-0", "it asked for a welcome and got one"
    bench.server = SERVER
    bench.tick(0.5)
    bench.hear(Unknown)
    assert bench.said(Hello)
    bench.welcome()
    assert bench.machine.server_epoch == SERVER


def test_a_late_refusal_does_not_end_an_instance_that_was_welcomed_since() -> None:
    bench = Bench()
    bench.server = Epoch("server-0")
    bench.hear(Refused, reason="too late")
    assert not bench.all(Halt)


def test_work_of_a_server_that_was_replaced_is_refused() -> None:
    bench = Bench()
    bench.server = Epoch("server-2")
    bench.hear(Unknown)
    bench.welcome()
    bench.server = SERVER
    bench.run()
    assert bench.counted() == ["stale_message"]
    assert bench.machine.leases == ()


def test_work_that_overtakes_the_welcome_waits_for_it() -> None:
    bench = Bench(welcome=False)
    bench.run()
    assert bench.out == []
    bench.welcome()
    assert [pull.lease for pull in bench.all(StartPull)] == [FIRST]


def test_a_silent_server_changes_nothing_about_the_work() -> None:
    bench = Bench()
    bench.compute()
    bench.tick(3600.0)
    assert not bench.all(Abort)
    bench.feed(Ended(outcome=bench.staged()))
    assert bench.reported(Staged)
    assert bench.machine.leases == (FIRST,)


# -- stages -------------------------------------------------------------------------------------------------------


def test_a_stage_pulls_computes_and_reports_each_step_of_it() -> None:
    bench = Bench()
    bench.run()
    assert [(pull.lease, pull.inputs) for pull in bench.all(StartPull)] == [(FIRST, (INPUT,))]
    bench.feed(Pulled(lease=FIRST, seconds=0.25, nbytes=64, plane="shm"))
    (fetched,) = bench.reported(Fetched)
    assert (fetched.seconds, fetched.nbytes, fetched.plane) == (0.25, 64, "shm")
    (compute,) = bench.all(StartCompute)
    assert (compute.params, compute.budget_seconds) == ({"seed": 1}, 9.0)
    bench.feed(ComputeStarted(lease=FIRST))
    assert bench.reported(Started)
    bench.feed(Ended(outcome=bench.staged()))
    (staged,) = bench.reported(Staged)
    assert staged.pull == Pull(seconds=0.25, nbytes=64, plane="shm")
    assert {report.role for report in bench.all(Report)} == {D}


def test_a_stage_without_inputs_goes_straight_to_the_compute_thread_with_its_images() -> None:
    bench = Bench()
    bench.run(blobs=(b"png",), inputs=())
    (compute,) = bench.all(StartCompute)
    assert compute.blobs == (b"png",)


def test_progress_is_thinned_out_and_its_end_is_never_lost() -> None:
    bench = Bench()
    bench.compute()
    seen: list[int] = []
    for step in range(1, 101):
        bench.now += 0.01
        bench.feed(Stepped(lease=FIRST, step=step, steps=101))
        seen += [progress.step for progress in bench.reported(Progress)]
    assert 4 <= len(seen) <= 6
    bench.feed(Ended(outcome=bench.staged()))
    messages = [report.message for report in bench.all(Report)]
    assert [type(message) for message in messages] == [Progress, Staged]
    assert messages[0].step == 100  # type: ignore[union-attr]


def test_a_preview_that_comes_late_never_turns_progress_back() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stepped(lease=FIRST, step=1, steps=9))
    bench.feed(Stepped(lease=FIRST, step=3, steps=9))
    bench.feed(Stepped(lease=FIRST, step=2, steps=9, preview=b"two"))
    bench.feed(Stepped(lease=FIRST, step=4, steps=9))
    bench.tick(0.2)
    assert [(p.step, p.preview) for p in bench.reported(Progress)] == [(4, b"two")]


def test_held_back_progress_comes_with_the_next_tick_that_it_asks_for() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stepped(lease=FIRST, step=1, steps=9))
    bench.now += 0.05
    bench.feed(Stepped(lease=FIRST, step=2, steps=9))
    assert not bench.reported(Progress)
    bench.tick(0.2)
    assert [progress.step for progress in bench.reported(Progress)] == [2]


def test_the_last_step_is_reported_at_once() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Stepped(lease=FIRST, step=8, steps=9))
    bench.feed(Stepped(lease=FIRST, step=9, steps=9))
    assert [progress.step for progress in bench.reported(Progress)] == [9]


def test_an_outcome_is_repeated_until_it_is_acknowledged() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    bench.tick(6.5)  # after 2 and 6 seconds
    assert len(bench.reported(Staged)) == 2
    bench.tick(80.0)
    assert len(bench.reported(Staged)) == 10
    bench.hear(Ack, leases=(FIRST,))
    assert [forget.lease for forget in bench.all(Forget)] == [FIRST]
    bench.tick(10.0)
    assert not bench.reported(Staged)
    assert bench.machine.leases == ()


def test_files_are_kept_until_they_are_acknowledged() -> None:
    bench = Bench()
    bench.compute()
    finished = Finished(
        instance=InstanceId("denoiser"),
        epoch=Epoch("denoiser/1"),
        server_epoch=None,
        lease=FIRST,
        files=(FILE,),
        compute_seconds=1.0,
        encode_seconds=0.0,
    )
    bench.feed(Ended(outcome=finished))
    assert bench.reported(Finished)
    assert not bench.all(Forget)
    bench.hear(Ack, leases=(FIRST, Lease(RequestId("never had"), D, 1)))
    assert len(bench.all(Forget)) == 1


def test_a_failed_pull_ends_the_stage_and_names_the_copy() -> None:
    bench = Bench()
    bench.run()
    error = ErrorInfo(code="transfer_failed", message="no route", blame="instance", retryable=True)
    bench.feed(PullFailed(lease=FIRST, copy=CopyId("in"), error=error))
    (failed,) = bench.reported(StageFailed)
    assert (failed.lost_copies, failed.error) == (("in",), error)


def test_a_stage_of_a_role_that_it_does_not_serve_is_handed_back() -> None:
    bench = Bench()
    bench.run(Lease(RequestId("r"), E, 1), inputs=())
    (failed,) = bench.reported(StageFailed)
    assert failed.error.message == "role=encoder: this instance serves denoiser"
    assert failed.error.retryable
    assert not bench.all(StartCompute)


def test_more_leases_than_slots_are_accepted_and_counted() -> None:
    bench = Bench(slots=1)
    bench.run()
    bench.run(Lease(RequestId("s"), D, 1))
    assert bench.counted() == ["slots_exceeded"]
    assert bench.all(StartPull)


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_repeated_grant_runs_the_stage_once(acknowledged: bool) -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    if acknowledged:
        bench.hear(Ack, leases=(FIRST,))
    bench.run()
    assert bench.counted() == ["repeated_lease"]
    assert not bench.all(StartPull)


# -- cancelling ---------------------------------------------------------------------------------------------------


def test_cancel_aborts_once_and_the_end_is_reported() -> None:
    bench = Bench()
    bench.compute()
    bench.hear(Cancel, lease=FIRST)
    assert [abort.lease for abort in bench.all(Abort)] == [FIRST]
    bench.hear(Cancel, lease=FIRST)
    assert not bench.all(Abort)
    bench.feed(Stepped(lease=FIRST, step=3, steps=9))
    assert bench.out == []
    bench.feed(Ended(outcome=bench.stopped()))
    assert bench.reported(Stopped)


def test_cancel_during_a_pull_never_computes() -> None:
    bench = Bench()
    bench.run()
    bench.hear(Cancel, lease=FIRST)
    assert bench.all(Abort)
    bench.feed(Pulled(lease=FIRST, seconds=0.1, nbytes=1, plane="shm"))
    assert bench.out == []
    error = ErrorInfo(code="transfer_failed", message="cancelled", blame="instance")
    bench.feed(PullFailed(lease=FIRST, copy=CopyId("in"), error=error))
    assert bench.reported(Stopped)
    assert not bench.reported(StageFailed)


def test_cancel_of_an_unknown_lease_is_answered_and_bars_a_late_grant() -> None:
    bench = Bench()
    bench.hear(Cancel, lease=FIRST)
    assert bench.reported(Stopped)
    assert not bench.all(Abort)
    bench.run()
    assert bench.counted() == ["repeated_lease"]


def test_cancel_that_crosses_the_result_gets_the_result() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    bench.hear(Cancel, lease=FIRST)
    assert bench.reported(Staged)
    assert not bench.all(Abort)


# -- copies -------------------------------------------------------------------------------------------------------


def copies_in_the_next_heartbeat(bench: Bench) -> tuple[str, ...]:
    bench.tick(0.5)
    return bench.said(Heartbeat)[-1].copies


def test_copies_are_listed_from_the_acknowledgement_until_the_release() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    assert copies_in_the_next_heartbeat(bench) == ()
    bench.hear(Ack, leases=(FIRST,))
    assert copies_in_the_next_heartbeat(bench) == ("out",)
    bench.hear(Release, copies=(CopyId("out"),))
    assert [release.copies for release in bench.all(ReleaseCopies)] == [("out",)]
    assert copies_in_the_next_heartbeat(bench) == ()


def test_dropped_copies_are_reported_once() -> None:
    bench = Bench()
    bench.compute()
    bench.feed(Ended(outcome=bench.staged()))
    bench.hear(Ack, leases=(FIRST,))
    bench.feed(CopiesDropped(copies=(CopyId("out"), CopyId("released long ago"))))
    assert [dropped.copies for dropped in bench.reported(Dropped)] == [("out",)]
    assert copies_in_the_next_heartbeat(bench) == ()


def test_outputs_of_a_stage_that_was_already_over_are_freed() -> None:
    bench = Bench()
    bench.feed(Ended(outcome=bench.staged()))
    assert [release.copies for release in bench.all(ReleaseCopies)] == [("out",)]
    assert not bench.all(Report)


def test_a_halted_machine_stays_silent() -> None:
    bench = Bench()
    bench.feed(Stop(reason="done"))
    assert bench.run() == []
    assert bench.machine.next_deadline(bench.now) > bench.now


def test_roles_share_one_machine() -> None:
    bench = Bench(roles=(Role.ENCODER, Role.DENOISER))
    bench.run(Lease(RequestId("r"), E, 1), inputs=())
    bench.feed(ComputeStarted(lease=Lease(RequestId("r"), E, 1)))
    assert [report.role for report in bench.all(Report)] == [E]
