"""`triptych generate` and `triptych demo` as a user types them."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from tests.e2e.conftest import Spawn
from tests.e2e.harness import Deployment, until
from triptych.launch.ports import free_ports

PROMPT = "a red circle moves right on blue"


def test_generate_writes_the_video_that_the_api_makes(pool: Deployment, spawn: Spawn, folder: Path) -> None:
    words = ["--size", "64x64", "--num-frames", "5", "--steps", "3", "--guidance-scale", "2.5", "--seed", "7"]
    words += ["--negative-prompt", "gray"]
    process = spawn("generate", "generate", PROMPT, "-o", "made/clip.mp4", "--server", pool.api.url, *words)
    assert process.end() == 0, process.output()
    assert "clip.mp4" in process.output().splitlines()[-1]
    made = (folder / "made" / "clip.mp4").read_bytes()
    assert made == pool.api.make(prompt=PROMPT, guidance_scale=2.5, negative_prompt="gray")


def test_generate_takes_a_length_in_seconds(pool: Deployment, spawn: Spawn, folder: Path) -> None:
    words = ["--size", "32x32", "--seconds", "1.125", "--steps", "2", "--guidance-scale", "3", "--seed", "7"]
    process = spawn("generate", "generate", PROMPT, "-o", "clip.mp4", "--server", pool.api.url, *words)
    assert process.end() == 0, process.output()
    nine_frames = pool.api.make(prompt=PROMPT, size="32x32", num_frames=9, num_inference_steps=2)
    assert (folder / "clip.mp4").read_bytes() == nine_frames


def test_generate_writes_an_image_where_the_name_asks_for_one(pool: Deployment, spawn: Spawn, folder: Path) -> None:
    words = ["--size", "64x32", "--steps", "2"]
    process = spawn("generate", "generate", PROMPT, "-o", "still.webp", "--server", pool.api.url, *words)
    assert process.end() == 0, process.output()
    with Image.open(folder / "still.webp") as image:
        assert (image.format, image.size) == ("WEBP", (64, 32))


def test_generate_says_what_the_server_refuses(pool: Deployment, spawn: Spawn) -> None:
    process = spawn("generate", "generate", PROMPT, "-o", "x.mp4", "--server", pool.api.url, "--steps", "100000")
    assert process.end() == 2
    assert "num_inference_steps=100000" in process.output()


def test_generate_without_a_server_says_so(spawn: Spawn) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    process = spawn("generate", "generate", PROMPT, "-o", "x.mp4", "--server", url)
    assert process.end() == 2
    assert url in process.output()


def test_the_demo_makes_a_video_and_names_it_last(spawn: Spawn, folder: Path) -> None:
    process = spawn("demo", "demo")
    until(lambda: process.status is not None, "the end of the demo")
    assert process.status == 0, process.output()
    output = process.output()
    assert output.count("mooncake") == 2, "both handoffs go through Mooncake"
    for role in ("encoder", "denoiser", "decoder"):
        assert role in output
    last = output.splitlines()[-1]
    assert last == "outputs/demo.mp4"
    assert (folder / last).read_bytes()[4:8] == b"ftyp"
