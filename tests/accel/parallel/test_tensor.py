"""Weights, and pictures, spread over two ranks: each has half, and the result is that of one up to rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.pipeline.harness import finish, post
from tests.worker.ranks.pair import SMALL, Pair
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.frames import FrameStream
from triptych.pipeline.stage import Clip, Streaming


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(Parallelism(tp=2, encoder_tp=2, decoder_tp=2))
    yield pair
    pair.close()


def held(part: nn.Module) -> int:
    """Numbers of a module that lie in this process."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in part.parameters())


def test_half_of_a_denoisers_weights_on_each_of_two_ranks(pair: Pair) -> None:
    alone, shared = pair.both(num_inference_steps=3)
    torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-5)
    whole, mine = (held(p.component(Role.DENOISER, "transformer").blocks) for p in (pair.alone, pair.rank0))
    assert mine < 0.52 * whole
    assert "weights spread over 2" in pair.shared.fingerprint


def test_half_of_a_text_encoders_weights_on_each_of_two_ranks(pair: Pair) -> None:
    for prompt in ("a red circle on a blue background", "a blue square"):
        alone, shared = (
            finish(pipeline.start(Role.ENCODER, {**SMALL, "prompt": prompt}, [], ()))
            for pipeline in (pair.alone, pair.shared)
        )
        ours, theirs = ([t for output in result.outputs for t in output.tensors] for result in (alone, shared))
        assert len(ours) == len(theirs) > 1
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    whole, mine = (held(p.component(Role.ENCODER, "text_encoder").encoder.block) for p in (pair.alone, pair.rank0))
    assert mine < 0.52 * whole


def test_pictures_decoded_in_a_strip_on_each_of_two_ranks(pair: Pair) -> None:
    params, inbox = pair.encoded(num_inference_steps=1, height=48, width=96)
    post(finish(pair.alone.start(Role.DENOISER, params, inbox[Role.DENOISER], [])), inbox)
    streams: list[FrameStream] = []

    def hear(clips: tuple[Clip, ...]) -> None:
        assert isinstance(clips[0].frames, FrameStream)
        streams.append(clips[0].frames)

    (ours,) = finish(pair.alone.start(Role.DECODER, params, inbox[Role.DECODER], [])).clips
    run = pair.shared.start(Role.DECODER, params, inbox[Role.DECODER], [])
    assert isinstance(run, Streaming)
    run.stream_to(hear)
    finish(run)
    (stream,) = streams  # frames are handed on as they are done
    stream.close(1.0)
    theirs = np.stack(list(stream))
    assert isinstance(ours.frames, np.ndarray)
    assert ours.frames.shape == theirs.shape == stream.shape == (5, 48, 96, 3)
    assert np.abs(ours.frames.astype(int) - theirs).max() <= 1  # of 255
    assert "decoded in 2 strips" in pair.shared.fingerprint


def test_requests_are_cancelled_and_continued_elsewhere_with_shared_weights(pair: Pair) -> None:
    for expected, shared in (pair.cancel_one_of_two(), pair.there_and_back()):
        torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-5)


def test_stages_that_are_cancelled_before_they_are_computed_leave_the_ranks_together(pair: Pair) -> None:
    params, inbox = pair.encoded(num_inference_steps=1)
    post(finish(pair.alone.start(Role.DENOISER, params, inbox[Role.DENOISER], [])), inbox)
    pair.shared.start(Role.ENCODER, params, [], []).cancel()
    pair.shared.start(Role.DECODER, params, inbox[Role.DECODER], []).cancel()
    (clip,) = finish(pair.shared.start(Role.DECODER, params, inbox[Role.DECODER], [])).clips
    assert clip.frames.shape == (5, 64, 64, 3)
