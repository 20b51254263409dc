"""The doors of a real deployment, each as its own clients use it: the OpenAI SDK, LiteLLM, and tasks in three posts."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from typing import Any

import av
import pytest
from openai import OpenAI
from PIL import Image

from tests import asking
from tests.e2e.harness import Deployment, until
from triptych.config import METRICS_OFFSET

PARTS = ("encoder", "transformer", "decoder")
"""As the task ports are ordered."""

LITELLM = """
import json, sys, time
import litellm

server = {"api_base": sys.argv[1], "api_key": "none"}
small = {"num_frames": 9, "num_inference_steps": 2, "guidance_scale": 3.0, "seed": 5}

def finish(video):
    while video.status not in ("completed", "failed"):
        time.sleep(0.05)
        video = litellm.video_status(video_id=video.id, **server)
    return video

video = finish(litellm.video_generation(
    model="openai/tiny", prompt="a red ball moves right on blue", size="64x64", extra_body=small, **server
))
remix = finish(litellm.video_remix(video_id=video.id, prompt="a green square on black", **server))
print(json.dumps({
    "video": video.model_dump(),
    "content": litellm.video_content(video_id=video.id, **server).hex(),
    "remix": remix.model_dump(),
    "remixed": litellm.video_content(video_id=remix.id, **server).hex(),
    "listed": [one["id"] for one in litellm.video_list(custom_llm_provider="openai", **server)["data"]],
}))
"""


def client(pool: Deployment) -> OpenAI:
    return OpenAI(base_url=f"{pool.api.url}/v1", api_key="none", timeout=60)


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")  # OpenAI's own service, not the SDK
def test_the_sdk_makes_remixes_and_downloads_a_video(pool: Deployment) -> None:
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
        thumbnail = Image.open(io.BytesIO(openai.videos.download_content(video.id, variant="thumbnail").read()))
        assert (thumbnail.format, thumbnail.size) == ("WEBP", (64, 64))
        remix = openai.videos.remix(video.id, prompt="a green square on black")
        assert remix.remixed_from_video_id == video.id
        pool.api.done(remix.id)
        assert openai.videos.download_content(remix.id).read() != content
        assert openai.videos.delete(video.id).deleted


def test_an_image_comes_as_a_jpeg(pool: Deployment) -> None:
    with client(pool) as openai:
        images = openai.images.generate(
            prompt="a red ball", size="64x64", response_format="b64_json", output_format="jpeg",
            extra_body={"num_inference_steps": 2, "seed": 5},
        )  # fmt: skip
    assert images.data is not None
    assert images.data[0].b64_json is not None
    picture = Image.open(io.BytesIO(base64.b64decode(images.data[0].b64_json)))
    assert (picture.format, picture.size) == ("JPEG", (64, 64))


def test_a_job_of_several_videos_gives_each_by_its_number(pool: Deployment) -> None:
    job = pool.api.submit(seed=5, n=2)
    assert pool.api.done(job)["n"] == 2
    url = f"{pool.api.url}/v1/videos/{job}/content"
    first, second = (asking.get(url, params={"index": index}).raise_for_status().content for index in (0, 1))
    assert asking.get(url).content == first
    assert first[4:8] == second[4:8] == b"ftyp"
    assert first != second
    answer = asking.get(url, params={"index": 2})
    assert answer.status_code == 404
    assert "made 2, counted from 0" in answer.json()["error"]["message"]


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


def test_litellm_makes_remixes_and_fetches_a_video(pool: Deployment) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LITELLM, f"{pool.api.url}/v1"],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["video"]["status"], told["video"]["size"]) == ("completed", "64x64")
    asked = {"size": "64x64", "num_frames": 9, "num_inference_steps": 2, "seed": 5}
    assert bytes.fromhex(told["content"]) == pool.api.make(**asked)
    assert told["remix"]["status"] == "completed"
    assert bytes.fromhex(told["remixed"]) == pool.api.make(**asked, prompt="a green square on black")
    assert {plain(told["video"]["id"]), plain(told["remix"]["id"])} <= {plain(listed) for listed in told["listed"]}


def plain(id: str) -> str:
    """Our own id in one of LiteLLM's, which wrap it together with the name of the provider."""
    return base64.b64decode(id.removeprefix("video_")).decode().rpartition("video_id:")[2]


def task_url(pool: Deployment, part: str) -> str:
    assert pool.task_ports is not None
    return f"http://127.0.0.1:{pool.task_ports[PARTS.index(part)]}"


def post(pool: Deployment, part: str, payload: dict[str, Any]) -> str:
    """Post a task to the port of one role; its id."""
    answer = asking.post(f"{task_url(pool, part)}/v1/tasks/video/", json=payload)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"task_id", "task_status", "save_result_path"}
    return answer.json()["task_id"]


def finished(pool: Deployment, task: str) -> dict[str, Any]:
    """Poll the decoder's port until the task is over, as the scripts do."""

    def look() -> dict[str, Any] | None:
        status = asking.get(f"{task_url(pool, 'decoder')}/v1/tasks/{task}/status").raise_for_status().json()
        return status if status["status"] in ("completed", "failed", "cancelled") else None

    return until(look, f"the end of {task}")


def test_clients_that_interleave_their_three_posts_get_their_own_prompts_back(pool: Deployment) -> None:
    prompts = {"one": "a red ball moves right on blue", "two": "a green square on black"}
    payloads = {
        who: {"prompt": prompt, "negative_prompt": "", "image_path": "", "seed": 7, "infer_steps": 3,
              "target_video_length": 5, "target_shape": [64, 64], "guidance_scale": 3.0,
              "save_result_path": f"saved/{who}.mp4"}
        for who, prompt in prompts.items()
    }  # fmt: skip
    tasks = {who: post(pool, "decoder", payload) for who, payload in payloads.items()}
    for who in ("two", "one"):
        post(pool, "transformer", payloads[who])
    status = asking.get(f"{task_url(pool, 'decoder')}/v1/tasks/{tasks['one']}/status").json()
    assert status["status"] == "pending"  # for its encoder
    for who in ("one", "two"):
        post(pool, "encoder", payloads[who])
    for who, task in tasks.items():
        status = finished(pool, task)
        assert (status["status"], status["error"]) == ("completed", None)
        assert status["save_result_path"] == f"saved/{who}.mp4"
        expected = pool.api.make(prompt=prompts[who])
        assert (pool.folder / "outputs" / "saved" / f"{who}.mp4").read_bytes() == expected
        assert asking.get(f"{task_url(pool, 'decoder')}/v1/tasks/{task}/result").content == expected
    for port in pool.task_ports or ():
        assert "triptych_requests" in asking.get(f"http://127.0.0.1:{port + METRICS_OFFSET}/metrics").text
