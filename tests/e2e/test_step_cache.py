"""Step caching in real processes: what is kept of a request moves with it, and the server counts what was saved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Deployment, until
from tests.pipeline.harness import Trio
from triptych.config import ModelConfig
from triptych.ids import ROLES
from triptych.pipeline.load import load_pipeline, quiet_libraries
from triptych.worker.media import encode_clip

THRESHOLD = 0.15
REQUEST: dict[str, Any] = {
    "prompt": "a red ball moves right on blue", "num_frames": 9, "num_inference_steps": 60, "guidance_scale": 3.0,
    "seed": 7,
}  # fmt: skip
SIZE = {"width": 128, "height": 128}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment")) as deployment:
        deployment.start_server()
        for name in ("encoder-0", "decoder-0"):
            deployment.start(name)
        for name in ("denoiser-0", "denoiser-1"):
            deployment.start(name, "--step-cache", str(THRESHOLD))
        deployment.wait_ready()
        yield deployment


def counted(deployment: Deployment, name: str, instance: str) -> float:
    """A counter of one instance in the server's metrics."""
    pattern = rf'^triptych_{name}_total{{instance_id="{instance}"}} (\S+)$'
    found = re.search(pattern, deployment.api.metrics(), re.MULTILINE)
    assert found is not None, f"no {name} of {instance}"
    return float(found[1])


def made(threshold: float) -> bytes:
    """The file of one process without an interruption."""
    quiet_libraries()
    pipeline: Any = load_pipeline(ModelConfig(path="tiny", device="cpu", step_cache=threshold), ROLES, "cpu")
    (clip,) = Trio.of(dict.fromkeys(ROLES, pipeline)).generate(REQUEST | SIZE)
    return encode_clip(clip, "mp4").data


def test_a_request_whose_denoiser_dies_goes_on_with_what_was_kept_of_its_steps(deployment: Deployment) -> None:
    ids = deployment.registered()
    job = deployment.api.submit(**REQUEST, size="128x128")
    victim = deployment.catch_denoiser(job, 12)
    deployment.instances[victim].kill()
    video = deployment.api.done(job)
    assert video["attempt"] >= 2
    expected = made(THRESHOLD)
    assert deployment.api.content(job) == expected
    assert expected != made(0.0), "nothing was passed over"
    (survivor,) = (ids[name] for name in ("denoiser-0", "denoiser-1") if name != victim)
    until(lambda: counted(deployment, "steps_skipped", survivor) > 0, "the count of what was passed over")


def test_the_server_counts_the_prompts_that_were_known(deployment: Deployment) -> None:
    encoder = deployment.registered()["encoder-0"]
    before = counted(deployment, "prompt_hits", encoder)
    for seed in range(2):
        deployment.api.make(prompt="a green ball", seed=seed)
    until(lambda: counted(deployment, "prompt_hits", encoder) > before, "the count of what was known")
    assert counted(deployment, "prompt_misses", encoder) > 0
