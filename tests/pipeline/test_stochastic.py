"""Schedulers that add noise in a step draw it from the request's seed, though the loops hand them no generator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.config import ModelConfig
from triptych.ids import ROLES, Role
from triptych.models import EMBEDDED
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.randomness import APART
from triptych.pipeline.stage import Resumable, StageResult

from .harness import Trio, finish, latents, post
from .parity import classic

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
"""The DPM solver of Diffusers makes NumPy arrays of tensors."""

SCHEDULERS: dict[str, dict[str, Any]] = {
    "FlowMatchEulerDiscreteScheduler": {"stochastic_sampling": True, "shift": 3.0},
    "FlowMatchLCMScheduler": {"shift": 3.0},
    "DPMSolverMultistepScheduler": {
        "algorithm_type": "sde-dpmsolver++",
        "use_flow_sigmas": True,
        "prediction_type": "flow_prediction",
        "flow_shift": 3.0,
    },
}
REQUEST: dict[str, Any] = {
    "prompt": "a red circle",
    "seed": 3,
    "width": 32,
    "height": 32,
    "num_frames": 5,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "max_sequence_length": 64,
}
OTHER = REQUEST | {"prompt": "a blue square", "seed": 8, "num_inference_steps": 3}


def folder_with(scheduler: str, folder: Path) -> Path:
    """The embedded model with another scheduler."""
    shutil.copytree(EMBEDDED["tiny"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", scheduler]}))
    settings = {"_class_name": scheduler, **SCHEDULERS[scheduler]}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
    return folder


def trio_of(folder: Path, **more: Any) -> Trio:
    pipeline = load_pipeline(ModelConfig(path=str(folder), device="cpu", **more), ROLES, "cpu")
    assert isinstance(pipeline, ModularRolePipeline)
    return Trio.of(dict.fromkeys(ROLES, pipeline))


@pytest.fixture(scope="module", params=SCHEDULERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(request.param, tmp_path_factory.mktemp("stochastic") / "model")


@pytest.fixture(scope="module")
def trio(folder: Path) -> Trio:
    return trio_of(folder)


def denoised(trio: Trio, request: dict[str, Any]) -> torch.Tensor:
    inbox = trio.encoded(request)
    trio.stage(Role.DENOISER, request, inbox)
    return latents(inbox)


def test_equal_seeds_make_equal_videos(trio: Trio) -> None:
    """Symptom: two requests alike differed by 40 to 80 of 255 levels."""
    torch.manual_seed(1)
    first = denoised(trio, REQUEST)
    torch.manual_seed(2)
    assert torch.equal(denoised(trio, REQUEST), first)
    assert not torch.equal(denoised(trio, REQUEST | {"seed": 4}), first)


def test_the_global_generator_of_the_process_is_left_alone(trio: Trio) -> None:
    before = torch.get_rng_state()
    denoised(trio, REQUEST)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_video_is_that_of_the_classic_pipeline_whose_global_generator_begins_there(trio: Trio, folder: Path) -> None:
    (clip,) = trio.generate(REQUEST)
    assert isinstance(clip.frames, np.ndarray)
    asked = {name: value for name, value in REQUEST.items() if name != "seed"}
    whole = classic(folder)
    outside = torch.get_rng_state()
    torch.manual_seed((REQUEST["seed"] + APART) % 2**63)
    frames = whole(**asked, generator=torch.Generator("cpu").manual_seed(REQUEST["seed"]), output_type="pt").frames[0]
    torch.set_rng_state(outside)
    assert np.array_equal(clip.frames, (frames * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


def test_interleaved_runs_draw_what_they_draw_alone(trio: Trio) -> None:
    requests = (REQUEST, OTHER)
    alone = [denoised(trio, request) for request in requests]
    inboxes = [trio.encoded(request) for request in requests]
    runs = [trio.start(Role.DENOISER, request, inbox) for request, inbox in zip(requests, inboxes, strict=True)]
    waiting = list(zip(runs, inboxes, strict=True))
    while waiting:
        for run, inbox in list(waiting):
            torch.rand(3)
            if (result := run.advance()) is not None:
                post(result, inbox)
                waiting.remove((run, inbox))
    for inbox, expected in zip(inboxes, alone, strict=True):
        assert torch.equal(latents(inbox), expected)


def test_each_checkpoint_goes_on_with_the_same_noise(trio: Trio) -> None:
    inbox = trio.encoded(REQUEST)
    run = trio.start(Role.DENOISER, REQUEST, inbox)
    assert isinstance(run, Resumable)
    made = []
    while (result := run.advance()) is None:
        made.append(run.checkpoint())
    assert len(made) == 3
    for frozen in made:
        assert frozen is not None
        again = trio.start(Role.DENOISER, REQUEST, inbox)
        assert isinstance(again, Resumable)
        again.restore(frozen[0], [tensor.clone() for tensor in frozen[1]])
        torch.rand(5)
        for expected, got in zip(result.outputs, finish(again).outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected.tensors, got.tensors, strict=True))


def test_runs_that_share_forwards_draw_what_they_draw_alone(folder: Path) -> None:
    """Joined forwards round otherwise, the noise of another request would make another video."""
    trio = trio_of(folder, batching=True)
    requests = (REQUEST, OTHER)
    alone = [denoised(trio, request) for request in requests]
    pipeline = trio.pipelines[Role.DENOISER]
    inboxes = [trio.encoded(request) for request in requests]
    runs = {n: trio.start(Role.DENOISER, r, inboxes[n]) for n, r in enumerate(requests)}
    while runs:
        order = list(runs)
        for n, result in zip(order, pipeline.advance_together([runs[n] for n in order]), strict=True):
            assert not isinstance(result, Exception), result
            if isinstance(result, StageResult):
                post(result, inboxes[n])
                del runs[n]
    for inbox, expected in zip(inboxes, alone, strict=True):
        assert torch.allclose(latents(inbox), expected, atol=1e-3)
