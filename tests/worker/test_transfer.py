"""The transfer threads over a real plane: what comes in, what goes out, and what happens when there is no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import pytest
import torch

from triptych.core.events import Ended, PullFailed
from triptych.ids import Epoch, InstanceId, RequestId, Role
from triptych.pipeline.stage import StageOutput
from triptych.transport.data.local import LocalPlane
from triptych.transport.data.protocol import Payload
from triptych.wire.messages import Lease, Staged, StageFailed, Stopped
from triptych.worker import transfer
from triptych.worker.jobs import Close, Identity, InputsReady, Post, PullJob, StageJob, Ticket
from triptych.worker.transfer import PullThread, StageThread

IDENTITY = Identity(instance=InstanceId("i"), epoch=Epoch("e"))
MIB = 1 << 20
WAIT = 10.0


@pytest.fixture
def plane() -> Iterator[LocalPlane]:
    plane = LocalPlane(instance=IDENTITY.instance, epoch=IDENTITY.epoch, pool_bytes=4 * MIB)
    yield plane
    plane.check_integrity()
    plane.close()


@pytest.fixture
def posts() -> SimpleQueue[Post]:
    return SimpleQueue()


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
