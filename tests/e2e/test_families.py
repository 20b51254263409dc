"""Every family of models in real processes: each role from a folder with its own weights, asked over HTTP.

What is expected is what the roles make without processes, sockets and files between them, of which the parity tests
show that it is what Diffusers' own pipeline makes. Three families are part of every run of the tests; ``make families``
goes through them all.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.harness import Deployment
from tests.pipeline.checkpoints import BUILDERS
from tests.pipeline.classic_checkpoints import CLASSIC_BUILDERS
from tests.pipeline.classic_harness import REQUESTS as CLASSIC
from tests.pipeline.classic_harness import TOLERATED
from tests.pipeline.harness import Trio, lone_folder
from tests.pipeline.modular_image_checkpoints import IMAGE_BUILDERS
from tests.pipeline.modular_video_checkpoints import VIDEO_BUILDERS
from tests.pipeline.parity import Film, picture, png
from tests.pipeline.qwen_checkpoints import QWEN_BUILDERS
from tests.pipeline.test_modular_families import REQUESTS as MODULAR
from tests.pipeline.wan_checkpoints import WAN_BUILDERS
from triptych.ids import ROLES, Role
from triptych.pipeline.load import quiet_libraries
from triptych.worker.media import encode_clip

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

BUILD: Mapping[str, Callable[[Path], None]] = {
    **BUILDERS, **IMAGE_BUILDERS, **VIDEO_BUILDERS, **WAN_BUILDERS, **QWEN_BUILDERS, **CLASSIC_BUILDERS
}  # fmt: skip

VIDEO: dict[str, Any] = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", "height": 32, "width": 48, "num_frames": 9,
    "max_sequence_length": 512, "num_inference_steps": 3, "guidance_scale": 5.0,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "prompt": "a cat", "height": 64, "width": 48, "max_sequence_length": 64, "num_inference_steps": 3,
    "guidance_scale": 4.0,
}  # fmt: skip
EDIT: dict[str, Any] = {
    "prompt": "a red cat", "num_inference_steps": 2, "guidance_scale": 3.0, "negative_prompt": "bad",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a family is asked. Pictures and clips stand in the request as such."""

    request: Mapping[str, Any]
    keeps: tuple[str, ...] = ()
    """Weights that its encoder needs besides those of text and image encoders."""

    @property
    def door(self) -> str:
        """Where a client posts it."""
        return "videos" if "num_frames" in self.request else "images"


def started_from(request: Mapping[str, Any], **more: Any) -> Case:
    """A model that begins with a picture, which its encoder looks at through the VAE."""
    return Case(
        request={**request, "image": picture({"height": 32, "width": 48, **request}, 1), **more}, keeps=("vae",)
    )


CASES: dict[str, Case] = {
    "wan_t2v": Case(request=VIDEO),
    "wan22_t2v": Case(request=VIDEO | {"guidance_scale_2": 2.0}),
    "wan_i2v": started_from(VIDEO),
    "wan22_i2v": started_from(VIDEO),
    "wan_flf2v": started_from(VIDEO, last_image=picture(VIDEO, 2)),
    "wan_vace": Case(request=VIDEO | {"video": Film.of(VIDEO)}, keeps=("vae",)),
    "wan22_ti2v": Case(request=VIDEO | {"width": 64}),
    "wan_distilled": Case(request=VIDEO | {"guidance_scale": 1.0}),
    "wan22_distilled": Case(request=VIDEO | {"guidance_scale": 1.0}),
    "qwen_t2i": Case(request=IMAGE | {"negative_prompt": "bad"}),
    "qwen_distilled": Case(request=IMAGE | {"guidance_scale": 1.0}),
    "flux": Case(request=IMAGE),
    "z_image": Case(request=IMAGE | {"negative_prompt": "bad"}),
    **{name: Case(request=request) for name, request in MODULAR.items()},
    **{
        name: started_from({key: value for key, value in request.items() if key != "image"})
        if "image" in request
        else Case(request=request)
        for name, request in CLASSIC.items()
    },
}
EDITS: dict[str, Case] = {
    "qwen_edit": started_from(EDIT),
    "qwen_edit_plus": Case(request=EDIT | {"image": [picture(VIDEO, 1), picture(VIDEO, 2)]}, keeps=("vae",)),
    "qwen_layered": started_from(EDIT, layers=2),
}
OFTEN = ("wan_flf2v", "ltx2", "sdxl")
"""At their blocks and replayed, of pictures, with sound."""


def without_processes(model: Path, work: Path, case: Case) -> list[Any]:
    """The clips that the roles make when they hand over to each other directly."""
    files: list[bytes] = []

    def filed(value: Any) -> Any:
        if isinstance(value, list):
            return [filed(item) for item in value]
        if not isinstance(value, Image.Image | Film):
            return value
        files.append(png(value) if isinstance(value, Image.Image) else value.file)
        return {"blob": len(files) - 1}

    asked = {"seed": 11, **{name: filed(value) for name, value in case.request.items()}}
    return list(Trio(model, work, encoder_keeps=case.keeps).generate(asked, files))


def said(value: Any) -> Any:
    """A value of a request as JSON can hold it."""
    if isinstance(value, list):
        return [said(item) for item in value]
    if isinstance(value, Image.Image):
        return f"data:image/png;base64,{base64.b64encode(png(value)).decode()}"
    return f"data:video/webm;base64,{base64.b64encode(value.file).decode()}" if isinstance(value, Film) else value


def check(family: str, case: Case, folder: Path) -> None:
    """Both give the same file, or for pictures the same pixels."""
    quiet_libraries()
    model = folder / "whole"
    BUILD[family](model)
    clips = without_processes(model, folder / "roles", case)
    body = {"seed": 11, **{name: said(value) for name, value in case.request.items()}}
    with Deployment(folder, model="model") as deployment:
        deployment.start_server()
        for role in ROLES:
            lone_folder(model, role, folder / role / "model", keeps=case.keeps if role is Role.ENCODER else ())
            deployment.start(f"{role}-0", cwd=folder / role)
        deployment.wait_ready()
        api = deployment.api
        if case.door == "videos":
            answer = api.post("/v1/videos", body)
            assert answer.status_code == 200, answer.text
            job = answer.json()["id"]
            api.done(job)
            assert api.content(job) == encode_clip(clips[0], "mp4").data
        else:
            answer = api.post("/v1/images/generations", body | {"response_format": "b64_json", "output_format": "png"})
            assert answer.status_code == 200, answer.text
            made = [
                np.asarray(Image.open(io.BytesIO(base64.b64decode(one["b64_json"])))) for one in answer.json()["data"]
            ]
            assert len(made) == len(clips)
            for image, clip in zip(made, clips, strict=True):
                assert np.array_equal(image, clip.frames[0])


@pytest.mark.parametrize("family", OFTEN)
def test_a_family_in_three_processes_makes_what_it_makes_in_one(family: str, folder: Path) -> None:
    check(family, CASES[family], folder)


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in CASES if name not in OFTEN])
def test_all_families_do(family: str, folder: Path) -> None:
    check(family, CASES[family], folder)


@pytest.mark.vision
@pytest.mark.parametrize("family", EDITS)
def test_families_that_edit_do(family: str, folder: Path) -> None:
    check(family, EDITS[family], folder)
