"""Every family of models in real processes: each role from a folder with its own weights, asked over HTTP.

What is expected is what the roles make without processes, sockets and files between them, of which the parity tests
show that it is what Diffusers' own pipeline makes. Three families are part of every run of the tests; ``make families``
goes through them all.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.harness import Deployment
from tests.pipeline.cases import BUILD, CASES, EDITS, Case
from tests.pipeline.classic_harness import TOLERATED
from tests.pipeline.harness import Trio, lone_folder
from tests.pipeline.parity import Film, png
from triptych.ids import ROLES, Role
from triptych.pipeline.load import quiet_libraries
from triptych.worker.media import encode_clip

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

OFTEN = ("wan_flf2v", "ltx2", "sdxl")
"""At their blocks and replayed, of pictures, with sound."""


def without_processes(model: Path, work: Path, case: Case) -> list[Any]:
    """The clips that the roles make when they hand over to each other directly."""
    return list(Trio(model, work, encoder_keeps=case.keeps).generate(*case.asked()))


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
