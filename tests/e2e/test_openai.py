"""The OpenAI SDK against a real deployment."""

from __future__ import annotations

import base64
import io

import av
import pytest
from openai import OpenAI
from PIL import Image

from tests.e2e.harness import Deployment


def client(pool: Deployment) -> OpenAI:
    return OpenAI(base_url=f"{pool.api.url}/v1", api_key="none", timeout=60)


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")  # OpenAI's own service, not the SDK
def test_the_sdk_makes_and_downloads_a_video(pool: Deployment) -> None:
    with client(pool) as openai:
        video = openai.videos.create_and_poll(
            prompt="a red ball moves right on blue",
            extra_body={"size": "64x64", "num_frames": 9, "num_inference_steps": 2, "seed": 5},
        )
        assert video.status == "completed", video.error
        content = openai.videos.download_content(video.id).read()
        with av.open(io.BytesIO(content)) as container:
            frames = list(container.decode(video=0))
        assert (len(frames), frames[0].width, frames[0].height) == (9, 64, 64)
        assert openai.videos.retrieve(video.id).progress == 100
        assert video.id in [listed.id for listed in openai.videos.list(limit=5).data]
        assert openai.videos.delete(video.id).deleted


def test_the_sdk_makes_an_image(pool: Deployment) -> None:
    with client(pool) as openai:
        answer = openai.images.generate(
            prompt="a green square on black",
            response_format="b64_json",
            extra_body={"size": "64x64", "num_inference_steps": 2, "seed": 5},
        )
    assert answer.data
    image = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or "")))
    assert image.size == (64, 64)
