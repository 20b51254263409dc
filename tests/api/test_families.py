"""Models of several families through the HTTP door, from what a client sends to the file that it gets."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from tests.api.studio import Studio
from tests.pipeline.checkpoints import BUILDERS
from tests.pipeline.modular_image_checkpoints import IMAGE_BUILDERS
from tests.pipeline.modular_video_checkpoints import VIDEO_BUILDERS
from tests.pipeline.parity import Film, classic, picture, png
from tests.pipeline.qwen_checkpoints import QWEN_BUILDERS
from tests.pipeline.wan_checkpoints import WAN_BUILDERS
from triptych.config import ModelConfig
from triptych.ids import ROLES
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import Clip
from triptych.worker.media import encode_clip

SIZE = {"height": 32, "width": 48}
ASKED: dict[str, Any] = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", "size": "48x32", "num_frames": 9, "num_inference_steps": 2,
    "guidance_scale": 5.0, "seed": 11, "fps": 16,
}  # fmt: skip
CLASSIC: dict[str, Any] = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", **SIZE, "num_frames": 9, "num_inference_steps": 2,
    "guidance_scale": 5.0, "max_sequence_length": 512,
}  # fmt: skip
"""The same for Diffusers' own pipelines."""

Opened = Callable[..., AbstractContextManager[tuple[httpx.Client, Path]]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Opens a server for a family; gives a client of it and the model's folder."""
    builders = BUILDERS | IMAGE_BUILDERS | QWEN_BUILDERS | VIDEO_BUILDERS | WAN_BUILDERS

    @contextmanager
    def studio(family: str, **settings: Any) -> Iterator[tuple[httpx.Client, Path]]:
        folder = tmp_path_factory.mktemp(family)
        builders[family](folder / "model")
        config = ModelConfig(path=str(folder / "model"), device="cpu", **settings)
        house = Studio(folder / "media", load_pipeline(config, ROLES, "cpu"))
        house.open()
        try:
            with httpx.Client(base_url=house.url, timeout=60) as client:
                yield client, folder / "model"
        finally:
            house.close()

    return studio


def made(http: httpx.Client, answer: httpx.Response) -> bytes:
    """The file of a video that was asked for."""
    assert answer.status_code == 200, answer.text
    path = f"/v1/videos/{answer.json()['id']}"
    deadline = time.monotonic() + 300
    while (video := http.get(path).json())["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert video["status"] == "completed", video["error"]
    return http.get(f"{path}/content").content


def expected(folder: Path, **more: Any) -> bytes:
    """What Diffusers' own pipeline makes, as a file."""
    generator = torch.Generator("cpu").manual_seed(ASKED["seed"])
    (images,) = classic(folder)(**CLASSIC | more, generator=generator, output_type="pil").frames
    frames = np.stack([np.asarray(image) for image in images])
    return encode_clip(Clip(frames=frames, fps=16.0, audio=None, sample_rate=0), "mp4").data


def data_url(file: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def test_a_first_and_a_last_frame_make_a_clip(opened: Opened) -> None:
    first, last = picture(SIZE, 1), picture(SIZE, 2)
    with opened("wan_flf2v") as (http, folder):
        files = {"input_reference": png(first), "last_frame": png(last)}
        form = {name: str(value) for name, value in ASKED.items()}
        video = made(http, http.post("/v1/videos", data=form, files=files))
        assert video == expected(folder, image=first, last_image=last)
        lone = http.post("/v1/videos", data=form, files={"input_reference": png(first)})
        assert (lone.status_code, lone.json()["error"]["param"]) == (400, "last_image")
        task = {
            "prompt": "a cat runs", "negative_prompt": "bad dog", "target_shape": [32, 48], "target_video_length": 9,
            "infer_steps": 2, "seed": 11, "guidance_scale": 5.0, "target_fps": 16,
            "image_path": data_url(png(first), "image/png"), "last_frame_path": data_url(png(last), "image/png"),
        }  # fmt: skip
        job = http.post("/v1/tasks/video/", json=task).json()["task_id"]
        deadline = time.monotonic() + 300
        while http.get(f"/v1/tasks/{job}/status").json()["status"] in ("pending", "processing"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert http.get(f"/v1/tasks/{job}/result").content == video


def test_a_clip_a_mask_and_reference_pictures_steer_vace(opened: Opened) -> None:
    clip, mask = Film.of(CLASSIC), Film.of(CLASSIC, seed=50)
    references = [picture(SIZE, 8), picture(SIZE, 9)]
    with opened("wan_vace") as (http, folder):
        asked = ASKED | {
            "max_sequence_length": 512,
            "conditioning_scale": 0.7,
            "video": data_url(clip.file, "video/webm"),
            "mask": data_url(mask.file, "video/webm"),
            "reference_images": [data_url(png(one), "image/png") for one in references],
        }
        video = made(http, http.post("/v1/videos", json=asked))
        assert video == expected(
            folder, video=clip.frames, mask=mask.frames, reference_images=references, conditioning_scale=0.7
        )
        alone = http.post("/v1/videos", json=ASKED | {"mask": asked["mask"]})
        assert alone.status_code == 400, (dict(alone.headers), alone.text[:300])
        assert alone.json()["error"]["param"] == "mask"


def test_a_video_comes_with_its_sound(opened: Opened) -> None:
    with opened("ltx2") as (http, _):
        asked = ASKED | {"size": "64x32", "max_sequence_length": 32}
        with av.open(io.BytesIO(made(http, http.post("/v1/videos", json=asked)))) as container:
            video, sound = container.streams.video[0], container.streams.audio[0]
            assert (video.frames, video.width, video.height) == (9, 64, 32)
            assert (sound.codec_context.name, sound.rate, sound.layout.name) == ("aac", 16000, "stereo")
            assert any(np.abs(frame.to_ndarray()).max() > 0 for frame in container.decode(sound))


def test_the_sdk_edits_what_a_mask_uncovers(opened: Opened) -> None:
    start = picture({"height": 64, "width": 32}, 3)
    mask = np.zeros((64, 32, 4), np.uint8)
    mask[:32, :, 3] = 255  # as OpenAI's clients write it: what is clear is to be made anew
    with opened("flux", task="inpainting") as (http, _), openai.OpenAI(
        base_url=f"{http.base_url}/v1", api_key="none", max_retries=0
    ) as sdk:  # fmt: skip
        more = {"num_inference_steps": 4, "seed": 7, "strength": 1.0, "max_sequence_length": 32}
        answer = sdk.images.edit(
            image=("start.png", png(start)), mask=("mask.png", png(Image.fromarray(mask))), prompt="a red ball", n=2,
            size="32x64", response_format="b64_json", extra_body=more,
        )  # type: ignore[call-overload]  # fmt: skip
        one, other = (np.asarray(Image.open(io.BytesIO(base64.b64decode(item.b64_json)))) for item in answer.data)
    assert one.shape == (64, 32, 3)
    assert not np.array_equal(one, other)


@pytest.mark.vision
def test_the_sdk_edits_from_several_pictures(opened: Opened) -> None:
    pictures = [picture({"height": 64, "width": 64}, 1), picture({"height": 40, "width": 90}, 2)]
    with opened("qwen_edit_plus") as (http, folder), openai.OpenAI(
        base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=120
    ) as sdk:  # fmt: skip
        more = {"num_inference_steps": 2, "seed": 7, "guidance_scale": 1.0}
        answer = sdk.images.edit(
            image=[(f"{number}.png", png(one)) for number, one in enumerate(pictures)], prompt="a red cat",
            size="48x64", response_format="b64_json", output_format="png", extra_body=more,
        )  # type: ignore[call-overload]  # fmt: skip
        edited = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))
        asked = {"prompt": "a red cat", "height": 64, "width": 48, "num_inference_steps": 2, "true_cfg_scale": 1.0}
        generator = torch.Generator("cpu").manual_seed(7)
        stock = classic(folder)(**asked, image=pictures, generator=generator, output_type="pil").images[0]
    assert np.array_equal(edited, np.asarray(stock))


def test_a_model_that_does_without_a_picture_makes_one_and_edits_one(opened: Opened) -> None:
    fields = {"prompt": "a red ball", "num_inference_steps": "1", "max_sequence_length": "32"}

    def size(answer: httpx.Response) -> tuple[int, int]:
        assert answer.status_code == 200, answer.text
        return Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))).size

    with opened("flux2_klein", defaults={"max_sequence_length": 32}) as (http, _):
        numbers = {name: int(value) if value.isdecimal() else value for name, value in fields.items()}
        asked = {**numbers, "size": "64x96", "response_format": "b64_json"}
        assert size(http.post("/v1/images/generations", json=asked)) == (64, 96)
        edit = {"data": fields | {"response_format": "b64_json"}}
        source = png(picture({"height": 70, "width": 112}))
        assert size(http.post("/v1/images/edits", files={"image": source}, **edit)) == (112, 64)
        both = [("image[]", source), ("image[]", source)]
        assert size(http.post("/v1/images/edits", files=both, data=edit["data"] | {"size": "64x64"})) == (64, 64)
        refused = http.post("/v1/images/edits", json=numbers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "image")
