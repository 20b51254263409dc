"""Requests that two ranks prepare beside others: the same bytes as in their turn, whatever fails of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pipeline.harness import finish
from tests.worker.ranks.pair import Pair
from tests.worker.ranks.row import FAILURES, Row, asked, left_over, misled, same
from tests.worker.test_ahead import WAIT, denoised, halfway
from triptych.config import DeviceType
from triptych.core.instance_events import Ended
from triptych.errors import OutOfMemory, StageError
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.stage import Preparable, Resumable
from triptych.pipeline.steps import SteppedBlock
from triptych.wire.messages import Stopped
from triptych.worker.beside import Made
from triptych.worker.ranks import leader as leader_module
from triptych.worker.ranks.orders import Begin, Failed, Prepare, Resume

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind: DeviceType = request.param
    pair = Pair(Parallelism(), device=kind)
    yield pair
    pair.close()


@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_requests_in_a_row_are_prepared_on_every_rank_and_have_the_bytes_of_requests_in_their_turn(
    pair: Pair, scale: float
) -> None:
    """Every third one goes on from a checkpoint. With guidance the ranks share its branches, without it the tokens."""
    requests = asked(pair, 8, guidance_scale=scale)
    expected = [denoised(pair.shared, *one) for one in requests]
    resumes = {number: halfway(pair.shared, *requests[number], 2) for number in range(1, 8, 3)}
    row = Row(pair)
    for number, (params, inputs) in enumerate(requests):
        row.add(params, inputs, resumes.get(number))
    row.start()
    made = [row.result(ticket) for ticket in row.tickets]
    row.close()
    assert all(map(same, made, expected))
    assert len(row.told(Prepare)) == len(requests) - 1
    assert len(row.told(Begin)) == len(requests)
    assert len(row.told(Resume)) == len(resumes)
    assert left_over(pair, row.told(Begin)) == []


def test_tensors_are_handed_on_while_all_that_is_made_is_watched(pair: Pair) -> None:
    """As it is beside a step on a GPU."""
    ((params, inputs),) = asked(pair, 1)
    expected = denoised(pair.shared, params, inputs)
    resume = halfway(pair.shared, params, inputs, 2)
    with Made(pair.team.device.type):
        run = pair.shared.start(Role.DENOISER, params, [(p.tree, p.tensors) for p in inputs], [])
        assert isinstance(run, Resumable)
        run.restore(resume.tree, resume.tensors)
        assert isinstance(run, Preparable)
        run.prepare()
    made = [tensor.cpu() for output in finish(run).outputs for tensor in output.tensors]
    assert same(made, expected)


@pytest.mark.parametrize("stop", ["cancelled", "suspended"])
def test_a_prepared_request_that_is_stopped_is_gone_on_every_rank(pair: Pair, stop: str) -> None:
    (first, second, third) = asked(pair, 3)
    expected = denoised(pair.shared, *third)
    row = Row(pair)
    long = row.add(first[0] | {"num_inference_steps": 100}, first[1])
    prepared = row.add(*second)
    row.start()
    until = time.monotonic() + WAIT
    while not row.told(Prepare):
        assert time.monotonic() < until
        time.sleep(0.01)
    getattr(prepared, stop).set()
    last = row.add(*third)
    while not isinstance(post := row.posts.get(timeout=WAIT), Ended):
        pass
    assert isinstance(post.outcome, Stopped)
    assert post.outcome.lease == prepared.lease
    long.cancelled.set()
    assert same(row.result(last), expected)
    row.close()
    assert left_over(pair, row.told(Begin)) == []


@pytest.mark.parametrize("failing", [*FAILURES, "rank 0"])
def test_what_fails_on_one_rank_while_it_is_prepared_is_begun_anew_in_its_turn(
    pair: Pair, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "GRACE_SECONDS", 0.1)
    first, second = asked(pair, 2)
    expected = [denoised(pair.shared, *one) for one in (first, second)]
    resume = halfway(pair.shared, *second, 2)
    assert pair.posts.empty()
    if failing == "rank 0":
        prepare, failed = SteppedBlock.prepare, list[SteppedBlock]()

        def full(block: SteppedBlock) -> None:
            if failed:
                prepare(block)
            failed.append(block)
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(SteppedBlock, "prepare", full)
    else:
        misled(pair, monkeypatch, *FAILURES[failing], number=2 if failing == "begin" else 1)
    row = Row(pair)
    row.add(*first)
    row.add(*second, resume)
    row.start()
    made = [row.result(ticket) for ticket in row.tickets]
    row.close()
    assert all(map(same, made, expected))
    assert len(row.told(Begin)) == 3, "the second one was begun anew"
    time.sleep(0.3)  # beyond the grace
    assert pair.posts.empty()
    assert left_over(pair, row.told(Begin)) == []


@pytest.mark.parametrize("short", [True, False])
def test_want_of_memory_on_another_rank_is_told_as_that(
    pair: Pair, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is told to ask for less, and the instance is not blamed."""
    ((params, inputs),) = asked(pair, 1)
    answered = pair.leader._answer

    def full(follower: Any, seconds: float | None) -> Any:
        answered(follower, seconds)
        return Failed(reason="full", short=short)

    with monkeypatch.context() as once:
        once.setattr(pair.leader, "_answer", full)
        with pytest.raises(OutOfMemory if short else StageError, match="rank 1: full") as failure:
            pair.shared.start(Role.DENOISER, params, [(p.tree, p.tensors) for p in inputs], [])
    assert isinstance(failure.value, OutOfMemory) is short
    assert failure.value.retryable


def test_a_request_that_one_rank_cannot_begin_in_its_turn_fails_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a follower without room for its tensors ended the instance, whose ranks had exchanged nothing."""
    ((params, inputs),) = asked(pair, 1)
    known = len(pair.orders)
    with monkeypatch.context() as once:
        misled(pair, once, *FAILURES["begin"], number=1)
        with pytest.raises(StageError, match="could not all begin: rank 1: ") as failure:
            pair.shared.start(Role.DENOISER, params, [(p.tree, p.tensors) for p in inputs], [])
    assert failure.value.retryable
    assert left_over(pair, pair.orders[known:]) == []
    alone, shared = pair.both(num_inference_steps=2)
    assert torch.equal(alone, shared)
