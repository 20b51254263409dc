"""A rank that dies while all stand in the middle of one stage: the others do not wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pipeline.harness import finish, post
from tests.worker.ranks.pair import SMALL, Pair
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.stage import Streaming
from triptych.worker.ranks.leader import RanksApart


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(Parallelism(encoder_tp=2, decoder_tp=2))
    yield pair
    pair.close()


def kill_follower(pair: Pair) -> None:
    process = pair.leader.followers[0].process
    process.kill()
    process.wait()


def test_in_the_middle_of_encoding(pair: Pair) -> None:
    run = pair.shared.start(Role.ENCODER, {**SMALL, "prompt": "another"}, [], [])
    first = pair.rank0.component(Role.ENCODER, "text_encoder").encoder.block[0]
    first.register_forward_pre_hook(lambda *_: kill_follower(pair))
    with pytest.raises(RanksApart):
        finish(run)
    assert pair.lost().thread in ("rank 1", "compute")


def test_in_the_middle_of_a_video_whose_first_frames_are_handed_on(pair: Pair) -> None:
    params, inbox = pair.encoded(num_inference_steps=1)
    post(finish(pair.alone.start(Role.DENOISER, params, inbox[Role.DENOISER], [])), inbox)
    run = pair.shared.start(Role.DECODER, params, inbox[Role.DECODER], [])
    assert isinstance(run, Streaming)
    heard: list[object] = []

    def hear(clips: object) -> None:
        heard.append(clips)
        kill_follower(pair)

    run.stream_to(hear)
    with pytest.raises(RanksApart):
        finish(run)
    assert heard
    assert pair.lost().thread in ("rank 1", "compute")
