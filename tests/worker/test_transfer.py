"""The transfer threads over a real plane: what comes in, what goes out, and what happens when there is no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import pytest
import torch

from tests.worker.conftest import IDENTITY, MIB
from triptych.accel.step_cache import FIELD
from triptych.core.instance_events import CheckpointMade, Ended, PullFailed
from triptych.ids import CopyId, RequestId, Role
from triptych.pipeline.codec import decode_state, encode_state
from triptych.pipeline.stage import StageOutput
from triptych.transport.data import local
from triptych.transport.data.local import LocalPlane
from triptych.transport.data.protocol import Payload
from triptych.wire.messages import Lease, Staged, StageFailed, Stopped
from triptych.worker import transfer
from triptych.worker.jobs import CheckpointJob, Close, InputsReady, Post, PullJob, StageJob, Ticket
from triptych.worker.transfer import PullThread, StageThread

WAIT = 60.0


@pytest.fixture
def stager(plane: LocalPlane, posts: SimpleQueue[Post]) -> Iterator[StageThread]:
    thread = StageThread(plane=plane, device="cpu", identity=IDENTITY, post=posts.put)
    thread.start()
    yield thread
    thread.close()
    thread.join(WAIT)
    assert not thread.is_alive()


@pytest.fixture
def pull(plane: LocalPlane, posts: SimpleQueue[Post]) -> Iterator[Callable[[PullJob], None]]:
    jobs: SimpleQueue[PullJob | Close] = SimpleQueue()
    thread = PullThread(0, plane=plane, device="cpu", identity=IDENTITY, post=posts.put, jobs=jobs)
    thread.start()
    yield thread.put
    thread.close()
    thread.join(WAIT)
    assert not thread.is_alive()


def ticket(request: str = "r", role: Role = Role.ENCODER) -> Ticket:
    return Ticket(Lease(RequestId(request), role, 1))


def output(nbytes: int, consumer: Role = Role.DENOISER) -> StageOutput:
    tensors = (torch.arange(nbytes, dtype=torch.uint8),) if nbytes else ()
    return StageOutput(consumer=consumer, tree=b"tree", tensors=tensors)


def job(of: Ticket, *outputs: StageOutput) -> StageJob:
    return StageJob(ticket=of, outputs=outputs, compute_seconds=1.5)


def ended(posts: SimpleQueue[Post]) -> Ended:
    post = posts.get(timeout=WAIT)
    assert isinstance(post, Ended)
    return post


def test_outputs_are_staged_for_their_readers_and_can_be_pulled(
    stager: StageThread, pull: Callable[[PullJob], None], posts: SimpleQueue[Post]
) -> None:
    stager.put(job(ticket(), output(1000), output(0, Role.DECODER)))
    staged = ended(posts).outcome
    assert isinstance(staged, Staged)
    assert staged.compute_seconds == 1.5
    assert [o.consumer for o in staged.outputs] == [Role.DENOISER, Role.DECODER]

    pull(PullJob(ticket=ticket(role=Role.DENOISER), inputs=tuple(o.manifest for o in staged.outputs)))
    ready = posts.get(timeout=WAIT)
    assert isinstance(ready, InputsReady)
    assert [p.tree for p in ready.inputs] == [b"tree", b"tree"]
    torch.testing.assert_close(ready.inputs[0].tensors[0], torch.arange(1000, dtype=torch.uint8))
    assert (ready.pulled.plane, ready.pulled.nbytes) == ("local", staged.outputs[0].manifest.nbytes)


def test_a_copy_that_is_gone_is_named(
    stager: StageThread, pull: Callable[[PullJob], None], plane: LocalPlane, posts: SimpleQueue[Post]
) -> None:
    stager.put(job(ticket(), output(1000), output(2000, Role.DECODER)))
    staged = ended(posts).outcome
    assert isinstance(staged, Staged)
    first, second = (o.manifest for o in staged.outputs)
    plane.release([second.copy])
    pull(PullJob(ticket=ticket(role=Role.DENOISER), inputs=(first, second)))
    failed = posts.get(timeout=WAIT)
    assert isinstance(failed, PullFailed)
    assert failed.copy == second.copy
    assert failed.error.retryable


def test_a_cancelled_pull_ends_as_stopped(
    stager: StageThread, pull: Callable[[PullJob], None], posts: SimpleQueue[Post]
) -> None:
    stager.put(job(ticket(), output(1000)))
    staged = ended(posts).outcome
    assert isinstance(staged, Staged)
    cancelled = ticket(role=Role.DENOISER)
    cancelled.cancelled.set()
    pull(PullJob(ticket=cancelled, inputs=(staged.outputs[0].manifest,)))
    assert isinstance(ended(posts).outcome, Stopped)


def test_what_can_never_fit_fails_with_both_sizes_and_is_not_tried_again(
    stager: StageThread, plane: LocalPlane, posts: SimpleQueue[Post]
) -> None:
    # Each would fit alone; together they are the output of one stage.
    half = plane.pool_bytes // 2 + 64
    stager.put(job(ticket(), output(half), output(half, Role.DECODER)))
    failed = ended(posts).outcome
    assert isinstance(failed, StageFailed)
    assert (failed.error.code, failed.error.blame, failed.error.retryable) == ("too_large", "caller", False)
    assert str(2 * half) in failed.error.message
    assert str(plane.pool_bytes) in failed.error.message
    assert plane.used_bytes == 0


@pytest.fixture
def crowded(plane: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> LocalPlane:
    """A plane whose every byte is being read by somebody: nothing can be dropped."""
    manifest = plane.stage(
        RequestId("other"), Payload(tree=b"", tensors=(torch.zeros(plane.pool_bytes - 64, dtype=torch.uint8),))
    )
    assert plane._pool.pin(manifest.copy) is not None
    return plane


def test_a_full_pool_is_waited_for_until_a_release(
    stager: StageThread, crowded: LocalPlane, posts: SimpleQueue[Post]
) -> None:
    stager.put(job(ticket(), output(MIB)))
    with pytest.raises(Empty):
        posts.get(timeout=0.2)
    (copy,) = (m.copy for m in crowded.copies())
    crowded._pool.unpin(copy)
    crowded.release([copy])
    stager.room_made()
    assert isinstance(ended(posts).outcome, Staged)


def test_a_pool_that_stays_full_fails_the_stage_for_another_to_try(
    stager: StageThread, crowded: LocalPlane, posts: SimpleQueue[Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_ROOM_SECONDS", 0.1)
    stager.put(job(ticket(), output(MIB)))
    failed = ended(posts).outcome
    assert isinstance(failed, StageFailed)
    assert (failed.error.code, failed.error.retryable) == ("pool_full", True)


def test_cancelling_ends_the_wait_for_room(stager: StageThread, crowded: LocalPlane, posts: SimpleQueue[Post]) -> None:
    waiting = ticket()
    stager.put(job(waiting, output(MIB)))
    waiting.cancelled.set()
    assert isinstance(ended(posts).outcome, Stopped)


# -- memory that runs out --------------------------------------------------------------------------------------------


@pytest.fixture
def out_of_memory(plane: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on there is no memory for copies, until the function that this gives is called."""

    def full(tensors: object) -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    clone = local._clone
    monkeypatch.setattr(local, "_clone", full)
    return lambda: monkeypatch.setattr(local, "_clone", clone)


def test_outputs_for_which_there_is_no_memory_fail_their_request_with_advice_and_take_no_room(
    stager: StageThread, plane: LocalPlane, out_of_memory: Callable[[], None], posts: SimpleQueue[Post]
) -> None:
    stager.put(job(ticket(), output(1000), output(2000, Role.DECODER)))
    failed = ended(posts).outcome
    assert isinstance(failed, StageFailed)
    assert (failed.error.code, failed.error.retryable) == ("out_of_memory", True)
    assert "the encoder ran out of memory: lower max_sequence_length" in failed.error.message
    assert plane.used_bytes == 0
    out_of_memory()
    stager.put(job(ticket(), output(plane.pool_bytes)))
    assert isinstance(ended(posts).outcome, Staged)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError(), KeyError("unforeseen")])
def test_a_checkpoint_that_cannot_be_staged_is_left_out(
    stager: StageThread,
    plane: LocalPlane,
    posts: SimpleQueue[Post],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(tensors: object) -> tuple[torch.Tensor, ...]:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(local, "_clone", fail)
        stager.put(first := checkpoint(ticket(), 1000))
        stager.put(checkpoint(ticket(), 1000, last=True))
        outcome = ended(posts).outcome
    assert isinstance(outcome, Stopped)
    assert outcome.checkpoint is None
    assert first.saved.is_set()
    assert plane.used_bytes == 0
    stager.put(job(ticket(), output(1000)))
    assert isinstance(ended(posts).outcome, Staged)


def test_a_pull_for_which_there_is_no_memory_fails_its_request_and_nothing_is_said_against_the_copy(
    plane: LocalPlane,
    pull: Callable[[PullJob], None],
    posts: SimpleQueue[Post],
    request: pytest.FixtureRequest,
) -> None:
    there = plane.stage(RequestId("r"), Payload(tree=b"", tensors=(torch.arange(9),)))
    more = request.getfixturevalue("out_of_memory")
    pull(PullJob(ticket=ticket(role=Role.DENOISER), inputs=(there,)))
    failed = ended(posts).outcome
    assert isinstance(failed, StageFailed)
    assert (failed.error.code, failed.error.retryable, failed.lost_copies) == ("out_of_memory", True, ())
    more()
    pull(PullJob(ticket=ticket(role=Role.DENOISER), inputs=(there,)))
    assert isinstance(posts.get(timeout=WAIT), InputsReady)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint(of: Ticket, nbytes: int, *, last: bool = False) -> CheckpointJob:
    frozen = Payload(tree=b"tree", tensors=(torch.arange(nbytes, dtype=torch.uint8),))
    return CheckpointJob(ticket=of, frozen=frozen, step=3, steps=9, last=last)


def test_a_checkpoint_is_staged_and_can_be_pulled_with_the_inputs(
    stager: StageThread, pull: Callable[[PullJob], None], posts: SimpleQueue[Post]
) -> None:
    job = checkpoint(ticket(), 1000)
    stager.put(job)
    made = posts.get(timeout=WAIT)
    assert isinstance(made, CheckpointMade)
    assert (made.lease, made.step, made.steps) == (job.ticket.lease, 3, 9)
    assert job.saved.is_set()
    pull(PullJob(ticket=job.ticket, inputs=(), resume=made.manifest))
    ready = posts.get(timeout=WAIT)
    assert isinstance(ready, InputsReady)
    assert ready.inputs == ()
    assert ready.resume is not None
    assert torch.equal(ready.resume.tensors[0], job.frozen.tensors[0])


def test_the_checkpoint_of_a_suspended_run_ends_its_lease(stager: StageThread, posts: SimpleQueue[Post]) -> None:
    stager.put(checkpoint(ticket(), 1000, last=True))
    outcome = ended(posts).outcome
    assert isinstance(outcome, Stopped)
    assert outcome.checkpoint is not None
    assert (outcome.step, outcome.steps) == (3, 9)


def test_a_checkpoint_never_displaces_an_output_and_ends_the_lease_without_itself(
    plane: LocalPlane, stager: StageThread, posts: SimpleQueue[Post]
) -> None:
    kept = plane.stage(RequestId("s"), Payload(tree=b"", tensors=(torch.zeros(3 * MIB, dtype=torch.uint8),)))
    stager.put(first := checkpoint(ticket(), 2 * MIB))
    stager.put(checkpoint(ticket(), 2 * MIB, last=True))
    outcome = ended(posts).outcome
    assert isinstance(outcome, Stopped)
    assert outcome.checkpoint is None
    assert first.saved.is_set()
    assert plane.copies() == (kept,)


def test_a_checkpoint_that_does_not_fit_is_made_without_what_step_caching_keeps(
    stager: StageThread, pull: Callable[[PullJob], None], posts: SimpleQueue[Post]
) -> None:
    latents, cached = torch.arange(1000, dtype=torch.uint8), torch.zeros(32 * MIB, dtype=torch.uint8)
    values = {"replaced": {"state": {FIELD: {"first": cached, "rest": cached}, "latents": latents}}, "step": 3}
    tree, tensors = encode_state(values, {})
    of = ticket()
    stager.put(CheckpointJob(ticket=of, frozen=Payload(tree=tree, tensors=tensors), step=3, steps=9, last=False))
    made = posts.get(timeout=WAIT)
    assert isinstance(made, CheckpointMade)
    pull(PullJob(ticket=of, inputs=(), resume=made.manifest))
    ready = posts.get(timeout=WAIT)
    assert isinstance(ready, InputsReady)
    assert ready.resume is not None
    there, _ = decode_state(ready.resume.tree, ready.resume.tensors, torch.device("cpu"))
    assert there["replaced"]["state"].keys() == {"latents"}
    assert torch.equal(there["replaced"]["state"]["latents"], latents)


def test_an_output_displaces_a_checkpoint_before_older_outputs(plane: LocalPlane) -> None:
    def staged(mib: float, *, spare: bool = False) -> CopyId:
        tensors = (torch.zeros(int(mib * MIB), dtype=torch.uint8),)
        return plane.stage(RequestId("r"), Payload(tree=b"", tensors=tensors), spare=spare).copy

    output, spare = staged(1), staged(1.5, spare=True)
    later = staged(2)
    assert {manifest.copy for manifest in plane.copies()} == {output, later}
    assert plane.take_dropped() == (spare,)
