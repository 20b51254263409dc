"""Two ranks on the CPU: the same bytes as one, whatever happens to requests, and no wait for a rank that is gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.pipeline.harness import finish
from tests.worker.ranks.pair import Pair
from triptych.accel.parallel.team import Team
from triptych.errors import StageError
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.stage import Resumable
from triptych.worker.ranks import leader as leader_module
from triptych.worker.ranks.leader import RanksApart
from triptych.worker.ranks.orders import Advance, Answer, Begin, Compiled


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(Parallelism())
    yield pair
    pair.close()


def test_guidance_on_two_ranks_is_bit_identical_and_each_computes_half(pair: Pair) -> None:
    pair.both(num_inference_steps=1)  # the shape of an answer is not known before
    pair.forwards = 0
    alone, shared = pair.both(num_inference_steps=4)
    assert torch.equal(alone, shared)
    assert pair.forwards == 4
    assert pair.tokens == 32
    assert pair.recordable, "nothing is exchanged within a forward"


def test_without_guidance_the_ranks_share_the_tokens(pair: Pair) -> None:
    pair.forwards = 0
    alone, shared = pair.both(num_inference_steps=3, guidance_scale=1.0)
    assert (pair.forwards, pair.tokens) == (3, 16)
    assert not pair.recordable, "a CUDA graph of one rank would wait for the other's"
    torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-5)


def test_a_layout_that_only_requests_without_guidance_have_is_warmed_up(pair: Pair) -> None:
    seen: set[tuple[int, int]] = set()
    block = pair.rank0.component(Role.DENOISER, "transformer").blocks[1]
    hook = block.register_forward_pre_hook(lambda _module, args: seen.add(args[0].shape[:2]))
    pair.warm_up()
    hook.remove()
    assert seen == {(1, 32), (1, 16)}


def test_followers_are_told_what_is_rehearsed_and_so_has_graphs_of_its_own_on_every_rank(pair: Pair) -> None:
    pair.orders.clear()
    pair.warm_up()
    told = [order.rehearses for order in pair.orders if isinstance(order, Begin)]
    assert told
    assert all(told)
    pair.orders.clear()
    pair.both(num_inference_steps=2)
    assert [order.rehearses for order in pair.orders if isinstance(order, Begin)] == [False]


def test_tokens_that_do_not_divide_are_shared_unevenly(pair: Pair) -> None:
    alone, shared = pair.both(num_inference_steps=2, guidance_scale=1.0, height=48, width=48, num_frames=1)
    assert pair.tokens == 5  # of 9
    torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-5)


def test_requests_interleave_and_one_is_cancelled_on_all_ranks(pair: Pair) -> None:
    expected, shared = pair.cancel_one_of_two()
    assert torch.equal(shared, expected)


def test_a_cancelled_run_takes_no_further_step_and_is_gone_on_every_rank(pair: Pair) -> None:
    whole, inbox = pair.encoded(num_inference_steps=100)
    run = pair.shared.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
    for _ in range(2):
        assert run.advance() is None
    pair.forwards = 0
    run.cancel()
    assert pair.forwards == 0
    pair.leader.tell(Advance(run=pair.orders[-1].run))  # as if the follower had it still
    with pytest.raises(RanksApart, match="rank 1 alone failed: KeyError"):
        pair.leader.settle()
    alone, shared = pair.both(num_inference_steps=2)
    assert torch.equal(alone, shared)


@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_a_checkpoint_of_one_process_is_continued_by_two_and_back(pair: Pair, scale: float) -> None:
    expected, shared = pair.there_and_back(guidance_scale=scale)
    torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-5)
    if scale != 1.0:
        assert torch.equal(shared, expected)


def test_a_request_that_fails_on_every_rank_fails_alone(pair: Pair) -> None:
    whole, inbox = pair.encoded(num_inference_steps=2)
    tree, tensors = inbox[Role.DENOISER][0]
    narrow = [t[..., :5] if t.is_floating_point() and t.ndim == 3 else t for t in tensors]
    run = pair.shared.start(Role.DENOISER, whole, [(tree, narrow)], [])
    with pytest.raises(StageError, match="denoiser failed"):
        finish(run)
    run.cancel()
    alone, shared = pair.both(num_inference_steps=2)
    assert torch.equal(alone, shared)
    assert pair.posts.empty()


def test_tensors_that_cannot_be_read_fail_their_request_and_no_other_rank_begins_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, inbox = pair.encoded(num_inference_steps=2)
    begun = pair.alone.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
    begun.advance()
    frozen = begun.checkpoint()
    run = pair.shared.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
    assert isinstance(run, Resumable)

    def cpu(_tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room for a copy")

    with monkeypatch.context() as full:
        full.setattr(torch.Tensor, "cpu", cpu)
        with pytest.raises(torch.OutOfMemoryError):
            pair.shared.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
        with pytest.raises(torch.OutOfMemoryError):
            run.restore(*frozen)
    run.cancel()
    alone, shared = pair.both(num_inference_steps=2, prompt="a blue square that a dog looks at")
    assert torch.equal(alone, shared)
    assert pair.posts.empty()


def test_what_a_follower_compiles_is_counted_and_logged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (follower,) = pair.leader.followers
    answer, left = follower.answer, [Compiled(compilations=2, seconds=9.5), Compiled(uncompiled=1)]

    def compiling(seconds: float) -> Answer | None:
        told = answer(seconds)
        return msgspec.structs.replace(told, compiled=left.pop(0)) if told is not None and left else told

    monkeypatch.setattr(follower, "answer", compiling)
    with caplog.at_level(logging.INFO, "triptych"):
        pair.both(num_inference_steps=2)
    assert (pair.tally.compilations, pair.tally.compile_seconds, pair.tally.uncompiled) == (2, 9.5, 1)
    assert "rank 1 compiled 2 graphs in 9.5 s" in caplog.text


def _fails_alone(pair: Pair) -> None:
    """An order that rank 1 cannot carry out, and rank 0 does not."""
    pair.leader.tell(Advance(run=10**6))


def test_a_rank_that_fails_alone_ends_the_run_of_all(pair: Pair) -> None:
    _fails_alone(pair)
    with pytest.raises(RanksApart, match="rank 1 alone failed"):
        pair.leader.settle()


def test_a_rank_that_fails_while_another_waits_for_it_is_heard_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "GRACE_SECONDS", 0.1)
    _fails_alone(pair)  # and nobody settles, as if rank 0 stood in a collective
    lost = pair.lost()
    assert (lost.thread, lost.mendable) == ("compute", False)
    assert "rank 1 failed" in lost.reason
    with pytest.raises(RanksApart):
        pair.leader.settle()


def test_the_death_of_a_rank_is_noticed_within_a_step(pair: Pair) -> None:
    whole, inbox = pair.encoded(num_inference_steps=100)
    run = pair.shared.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
    run.advance()
    begun = time.monotonic()
    pair.leader.followers[0].process.kill()
    with pytest.raises(RanksApart):
        finish(run)
    while pair.lost().thread != "rank 1":  # what an earlier failure posts late
        pass
    assert time.monotonic() - begun < 2 * leader_module.GRACE_SECONDS


def test_tensors_that_reach_some_ranks_only_end_the_instance_with_the_request_that_they_belong_to(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, inbox = pair.encoded()

    def broadcast(_team: Team, _tensor: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no room for a buffer")

    monkeypatch.setattr(Team, "broadcast", broadcast)
    with pytest.raises(RanksApart, match="no room for a buffer"):
        pair.shared.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
