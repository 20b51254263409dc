"""The journal's rows tell all that a next life of the server needs, also when later rows have replaced earlier ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import manifest
from triptych.core.events import Clocks, JobState, JobView, LeaseGranted, StageDone, StageTiming
from triptych.core.journal import (
    TRANSIENT_SLOT,
    Accepted,
    Deleting,
    FileNote,
    Finish,
    History,
    JournalEntry,
    Saved,
    Stored,
    displaced_by,
    replay,
    request_of,
    slot_of,
)
from triptych.ids import ROLES, InstanceId, RequestId, Role
from triptych.wire.messages import Lease, Output

E, D, V = ROLES
R = RequestId("video_1")
ACCEPTED = Accepted(
    request=R, output="video", params={"prompt": "a"}, metadata={}, queue_timeout=60.0, run_timeout=30.0, created_at=1.0
)
FILE = FileNote(name="f.mp4", mime="video/mp4", suffix=".mp4", nbytes=4, width=8, height=8, frames=5, fps=8.0)


def granted(role: Role, attempt: int = 1, instance: str = "i", waited: float = 1.0) -> LeaseGranted:
    return LeaseGranted(lease=Lease(R, role, attempt), instance=InstanceId(instance), waited=waited, ran=0.5)


def staged(role: Role, attempt: int = 1) -> StageDone:
    timing = StageTiming(
        role=role, instance=InstanceId("i"), attempt=attempt, waiting=0.0, pulling=0.0, pulled_bytes=0, plane="",
        running=1.0, compute=1.0, staging=0.0,
    )  # fmt: skip
    output = Output(consumer=ROLES[ROLES.index(role) + 1], manifest=manifest(f"{role}.{attempt}", R, "i"))
    return StageDone(
        lease=Lease(R, role, attempt), instance=InstanceId("i"), outputs=(output,), timing=timing, waited=2.0, ran=1.5
    )


def view(state: JobState) -> JobView:
    return JobView(
        request=R, state=state, attempt=1, step=0, steps=0, position=None, waiting_seconds=0.0, running_seconds=0.0,
        error=None, timings=(),
    )  # fmt: skip


def history(*entries: JournalEntry) -> History:
    return replay([ACCEPTED, *entries])[R]


def test_a_request_that_was_only_accepted_starts_from_the_beginning() -> None:
    restored = history().restore()
    assert (restored.request, restored.params, restored.attempt) == (R, {"prompt": "a"}, 1)
    assert (restored.queue_timeout, restored.run_timeout) == (60.0, 30.0)
    assert (restored.holder, restored.done) == (None, ())


def test_a_leased_stage_waits_for_its_holder_with_what_is_done_before() -> None:
    restored = history(granted(E), staged(E), granted(D, 2, "denoiser", waited=4.0)).restore()
    assert (restored.holder, restored.attempt, restored.waited) == ("denoiser", 2, 4.0)
    assert [stage.lease.role for stage in restored.done] == [E]
    assert [timing.role for timing in restored.timings] == [E]


def test_the_time_that_a_stage_took_before_the_server_died_is_used_up() -> None:
    restored = history(granted(E), Clocks(request=R, waited=3.0, ran=20.0)).restore()
    assert (restored.holder, restored.waited, restored.ran) == ("i", 3.0, 20.0)
    assert history(granted(E), Clocks(request=R, waited=3.0, ran=9.0), staged(E)).restore().ran == 1.5


def test_a_stage_that_is_done_has_no_holder() -> None:
    restored = history(granted(E), staged(E)).restore()
    assert (restored.holder, restored.waited, restored.ran) == (None, 2.0, 1.5)


def test_a_stage_that_was_leased_again_is_not_done() -> None:
    restored = history(granted(E), staged(E), granted(D), staged(D), granted(E, 2)).restore()
    assert [stage.lease.role for stage in restored.done] == [D]
    assert restored.attempt == 2


def test_stored_files_mean_done_even_when_the_end_was_not_written() -> None:
    told = history(granted(V), Stored(request=R, files=(FILE,), stored_at=9.0))
    assert not told.live
    assert (told.ended().view.state, told.ended().completed_at) == (JobState.DONE, 9.0)


def test_an_end_that_was_written_is_the_end() -> None:
    finish = Finish(view=view(JobState.CANCELLED), started_at=2.0, completed_at=3.0)
    told = history(Stored(request=R, files=(FILE,), stored_at=9.0), finish)
    assert told.ended() is finish


def test_files_that_were_saved_stay_so_whatever_is_written_later() -> None:
    finish = Finish(view=view(JobState.DONE), started_at=2.0, completed_at=3.0)
    stored = Stored(request=R, files=(FILE,), stored_at=2.5)
    assert history(stored, finish, Saved(request=R)).saved
    assert not history(stored, finish).saved
    slots = {slot_of(entry) for entry in (ACCEPTED, stored, finish, Saved(request=R), Deleting(request=R))}
    assert len(slots) == 5
    assert max(slots) < TRANSIENT_SLOT


def test_a_deletion_that_had_begun_is_no_live_request() -> None:
    told = history(Deleting(request=R))
    assert told.deleting
    assert not told.live


def test_entries_of_forgotten_requests_count_for_nothing() -> None:
    assert replay([granted(E), staged(E), Finish(view=view(JobState.DONE), started_at=None, completed_at=1.0)]) == {}


def test_requests_come_in_the_order_of_their_acceptance() -> None:
    names = [RequestId(name) for name in ("z", "a", "m")]
    told = replay([Accepted(**{**_fields(ACCEPTED), "request": name}) for name in names])
    assert list(told) == names


def _fields(accepted: Accepted) -> dict[str, object]:
    return {name: getattr(accepted, name) for name in Accepted.__struct_fields__}


@st.composite
def lives(draw: st.DrawFn) -> list[JournalEntry]:
    """What a router may have noted of one request: outputs get lost, attempts fail, the journal is cut off anywhere."""
    entries: list[JournalEntry] = []
    done: set[Role] = set()
    for attempt in range(1, draw(st.integers(0, 12)) + 1):
        done -= draw(st.sets(st.sampled_from((E, D)), max_size=1))
        role = next(role for role in ROLES if role not in done)
        entries.append(granted(role, attempt, waited=float(attempt)))
        if role is not V and draw(st.booleans()):
            entries.append(staged(role, attempt))
            done.add(role)
    return entries


@settings(deadline=None, max_examples=60)
@given(lives(), st.integers(0, 24))
def test_rows_that_replace_each_other_tell_the_same_as_all_entries(entries: list[JournalEntry], cut: int) -> None:
    kept: dict[tuple[RequestId, int], JournalEntry] = {}
    for entry in entries[:cut]:
        key = (request_of(entry), slot_of(entry))
        kept.pop(key, None)
        kept.pop((R, displaced_by(entry)), None)  # type: ignore[arg-type]
        kept[key] = entry
    assert history(*kept.values()).restore() == history(*entries[:cut]).restore()
    assert len(kept) <= 3


@settings(deadline=None, max_examples=30)
@given(lives())
def test_what_is_restored_never_grants_an_attempt_again(entries: list[JournalEntry]) -> None:
    restored = history(*entries).restore()
    used = [entry.lease.attempt for entry in entries if isinstance(entry, LeaseGranted | StageDone)]
    assert restored.attempt == max(used, default=1)
