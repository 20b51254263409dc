"""The same seed gives the same bytes, whatever way the pipeline is cut and the tensors travel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from diffusers import WanPipeline

from tests.e2e.harness import SMALL, Api, Deployment, Process, until
from triptych.launch.ports import free_ports
from triptych.models import tiny_path
from triptych.pipeline.stage import Clip
from triptych.worker.media import encode_clip

REQUESTS: tuple[dict[str, Any], ...] = (
    SMALL,
    SMALL | {"size": "96x64", "num_frames": 9, "num_inference_steps": 4, "seed": 11, "guidance_scale": 1.0},
    SMALL | {"prompt": "blue", "negative_prompt": "blurred", "seed": 2**31, "num_inference_steps": 2},
)


@pytest.fixture(scope="module")
def stock() -> list[bytes]:
    """What Diffusers' own pipeline makes of the requests, encoded as we encode."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pipeline: Any = WanPipeline.from_pretrained(str(tiny_path()), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    files = [encode_clip(Clip(frames=stock_frames(pipeline, request), fps=8), "mp4").data for request in REQUESTS]
    torch.set_num_threads(threads)
    return files


def stock_frames(pipeline: Any, request: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    width, height = map(int, request["size"].split("x"))
    result = pipeline(
        prompt=request["prompt"],
        negative_prompt=request.get("negative_prompt"),
        width=width,
        height=height,
        num_frames=request["num_frames"],
        num_inference_steps=request["num_inference_steps"],
        guidance_scale=request["guidance_scale"],
        max_sequence_length=64,
        generator=torch.Generator().manual_seed(request["seed"]),
        output_type="pil",
    )
    return np.stack([np.asarray(frame) for frame in result.frames[0]])


@pytest.fixture(scope="module")
def monolithic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """`triptych serve MODEL`, whose steps go to two requests in turn."""
    folder = tmp_path_factory.mktemp("monolithic")
    scheduler, *_ = free_ports(4)
    (port,) = free_ports(1)
    words = ["serve", "tiny", "--device", "cpu", "--port", str(port), "--scheduler-port", str(scheduler)]
    words += ["--max-running-requests", "2"]
    process = Process("monolithic", words, folder)
    api = Api(f"http://127.0.0.1:{port}")
    until(lambda: api.ready() or process.status is not None, "the monolithic server being ready")
    assert process.status is None, process.output()
    yield api
    api.close()
    assert process.stop() == 0


@pytest.fixture(scope="module")
def over_mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three role processes, tensors through Mooncake over TCP."""
    with Deployment(tmp_path_factory.mktemp("mooncake"), plane="mooncake") as deployment:
        yield deployment.start_all()


def check_handoffs(video: dict[str, Any], plane: str) -> None:
    """Both handoffs went the way that was asked for, with bytes."""
    into = {timing["role"]: timing for timing in video["timings"]}
    for role in ("denoiser", "decoder"):
        assert into[role]["plane"] == plane
        assert into[role]["pulled_bytes"] > 0


def check(api: Api, stock: list[bytes], plane: str) -> None:
    for request, expected in zip(REQUESTS, stock, strict=True):
        job = api.submit(**request)
        check_handoffs(api.done(job), plane)
        assert api.content(job) == expected, f"{request} over {plane}"


def test_one_process_gives_stock_diffusers_bytes(monolithic: Api, stock: list[bytes]) -> None:
    check(monolithic, stock, "local")


def test_three_processes_over_shared_memory_give_stock_diffusers_bytes(pool: Deployment, stock: list[bytes]) -> None:
    check(pool.api, stock, "shm")


def test_three_processes_over_mooncake_give_stock_diffusers_bytes(
    over_mooncake: Deployment, stock: list[bytes]
) -> None:
    check(over_mooncake.api, stock, "mooncake")


def test_a_short_request_that_comes_after_a_long_one_ends_first(monolithic: Api, stock: list[bytes]) -> None:
    long = monolithic.submit(num_inference_steps=100, size="192x192", num_frames=17)
    until(lambda: (monolithic.job(long)["step"] or 0) > 1, "the long request being denoised")
    short = monolithic.submit(**REQUESTS[0])
    monolithic.done(short)
    before = monolithic.job(long)
    assert (before["status"], before["stage"]) == ("in_progress", "denoising_running")
    assert monolithic.content(short) == stock[0]
    until(lambda: monolithic.job(long)["step"] > before["step"], "the long request going on")
    monolithic.delete(long)


def test_the_memory_of_each_role_is_what_the_operating_system_says(over_mooncake: Deployment) -> None:
    def told() -> dict[str, int] | None:
        """Each instance tells with a heartbeat, the first of which may be still to come."""
        names = {instance: name for name, instance in over_mooncake.registered().items()}
        found = {names[i["instance"]]: i["resident_bytes"] for i in over_mooncake.api.info()["instances"]}
        return found if set(found) == set(over_mooncake.instances) and all(found.values()) else None

    for name, resident in until(told, "the memory of each role").items():
        assert resident == pytest.approx(psutil.Process(over_mooncake.instances[name].pid).memory_info().rss, rel=0.5)


def test_the_files_of_a_deployment_stay_in_its_output_folder(over_mooncake: Deployment, folder: Path) -> None:
    job = over_mooncake.api.submit()
    over_mooncake.api.done(job)
    names = [p.name for p in (over_mooncake.folder / "outputs").rglob("*.mp4")]
    assert any(re.search(re.escape(job), name) for name in names)
