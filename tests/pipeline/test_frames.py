"""Frames that are handed on while later ones are decoded are those of the whole video, and make the same file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from triptych.accel.wan_vae import WanVaeDecoder, install
from triptych.config import ModelConfig
from triptych.errors import StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.frames import FrameStream
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import Clip, Streaming
from triptych.worker.media import encode_clip

from .harness import Trio

REQUEST: dict[str, Any] = {
    "prompt": "a red circle moving right on a blue background",
    "width": 32,
    "height": 32,
    "num_frames": 13,
    "num_inference_steps": 2,
    "seed": 3,
}


@pytest.fixture(scope="module")
def trio() -> Trio:
    pipeline = load_pipeline(ModelConfig(path="tiny", device="cpu"), ROLES, "cpu")
    assert isinstance(pipeline, ModularRolePipeline)
    vae = pipeline.component(Role.DECODER, "vae")
    install(vae, WanVaeDecoder(vae, chunk=2))
    return Trio.of(dict.fromkeys(ROLES, pipeline))


@pytest.mark.parametrize(("frames", "clips"), [(13, 1), (1, 0)])
def test_they_are_the_whole_videos(trio: Trio, frames: int, clips: int) -> None:
    request = {**REQUEST, "num_frames": frames}
    inbox = trio.encoded(request)
    trio.stage(Role.DENOISER, request, inbox)
    (whole,) = trio.stage(Role.DECODER, request, inbox).clips
    run = trio.start(Role.DECODER, request, inbox)
    assert isinstance(run, Streaming)
    early: list[Clip] = []
    run.stream_to(early.extend)
    result = run.advance()
    assert result is not None
    assert len(result.clips) == 1 - clips
    assert len(early) == clips  # an image is not worth it
    for clip in early:
        assert isinstance(clip.frames, FrameStream)
        clip.frames.close(1.0)
        assert (clip.frames.shape, clip.fps) == (whole.frames.shape, whole.fps)
        taken = list(clip.frames)
        assert np.array_equal(np.stack(taken), whole.frames)
        again = FrameStream(clip.frames.shape)
        again.put(torch.from_numpy(np.stack(taken[:5])))
        again.put(torch.from_numpy(np.stack(taken[5:])))
        again.close(1.0)
        assert encode_clip(Clip(frames=again, fps=8.0), None).data == encode_clip(whole, None).data


def test_no_frame_is_converted_twice(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = trio.pipelines[Role.DECODER].component(Role.DECODER, "video_processor")
    inbox = trio.encoded(REQUEST)
    trio.stage(Role.DENOISER, REQUEST, inbox)
    convert, converted = processor.postprocess_video, list[int]()

    def counted(video: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        converted.append(video.shape[2])
        return convert(video, *args, **kwargs)

    monkeypatch.setattr(processor, "postprocess_video", counted)
    run = trio.start(Role.DECODER, REQUEST, inbox)
    assert isinstance(run, Streaming)
    run.stream_to(lambda _: None)
    run.advance()
    assert sum(converted) == REQUEST["num_frames"]


def test_several_videos_of_one_request_come_whole(trio: Trio) -> None:
    request = {**REQUEST, "num_frames": 5, "n": 2}
    inbox = trio.encoded(request)
    trio.stage(Role.DENOISER, request, inbox)
    run = trio.start(Role.DECODER, request, inbox)
    assert isinstance(run, Streaming)
    early: list[Clip] = []
    run.stream_to(early.extend)
    result = run.advance()
    assert result is not None
    assert len(result.clips) == 2
    assert not early


def test_what_ends_the_decoding_ends_the_reading() -> None:
    stream = FrameStream((2, 1, 1, 3))
    stream.put(torch.zeros(1, 1, 1, 3, dtype=torch.uint8))
    stream.fail(StageError("no memory"))
    taken = iter(stream)
    assert next(taken).shape == (1, 1, 3)
    with pytest.raises(StageError, match="no memory"):
        next(taken)
