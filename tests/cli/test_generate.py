"""`triptych generate` with pictures, adapters and whatever else a model declares, against a live server."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from tests import live_house
from triptych.cli.main import main
from triptych.wire.schema import Param

make_house = live_house.make_house


def png(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def studio(make_house: Callable[..., Any]) -> Iterator[Any]:
    """A server whose model takes everything that one can."""
    schema = live_house.schema(with_count=True)
    more = (
        Param(name="image", type="images", max_length=3, nullable=True),
        Param(name="last_image", type="image", nullable=True),
        Param(name="mask_image", type="image", nullable=True),
        Param(name="reference_images", type="images", max_length=3, nullable=True),
        Param(name="flow_shift", type="number", default=3.0),
        Param(name="max_sequence_length", type="integer", default=512),
        Param(name="preview", type="boolean", default=False),
        Param(name="negative_prompt", type="string", nullable=True),
        Param(name="lora", type="adapters", nullable=True, choices=("fox", "snow")),
    )
    params = (*(param for param in schema.params if param.name != "image"), *more)
    with make_house(accepts=msgspec.structs.replace(schema, params=params)) as house:
        yield house


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with three pictures in it."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def generate(studio: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command; gives what it complained of, or nothing."""

    def run(*words: str) -> str:
        status = main(["generate", *words, "--server", studio.url])
        error = capsys.readouterr().err
        return error.partition("error: ")[2] if status else ""

    return run


def test_pictures_make_a_video(studio: Any, folder: Path, generate: Callable[..., str]) -> None:
    assert not generate("a cat", "-o", "a.mp4", "--image", "0.png", "--image", "1.png", "--last-frame", "2.png")
    params, blobs = studio.seen[-1]
    assert [blobs[item["blob"]] for item in params["image"]] == [png(0), png(1)]
    assert blobs[params["last_image"]["blob"]] == png(2)
    assert (folder / "a.mp4").read_bytes() == studio.clip


def test_a_picture_is_edited_within_a_mask(studio: Any, folder: Path, generate: Callable[..., str]) -> None:
    assert not generate("a cat", "-o", "a.webp", "--image", "0.png", "--mask", "1.png", "--size", "64x32")
    params, blobs = studio.seen[-1]
    assert (blobs[params["image"][0]["blob"]], blobs[params["mask_image"]["blob"]]) == (png(0), png(1))
    with Image.open(folder / "a.webp") as image:
        assert (image.format, image.size) == ("WEBP", (64, 32))


def test_adapters_are_chosen(studio: Any, generate: Callable[..., str]) -> None:
    assert not generate("a cat", "-o", "a.mp4", "--lora", "fox:0.8", "--lora", "snow")
    assert studio.seen[-1][0]["lora"] == "fox:0.8,snow"
    assert "'wolf' is none of the adapters served here: fox, snow" in generate("a", "-o", "a.mp4", "--lora", "wolf")


def test_anything_else_that_the_model_declares_can_be_said(studio: Any, generate: Callable[..., str]) -> None:
    words = ["flow_shift=5", "max_sequence_length=64", "preview=true", "negative_prompt=1", "run_timeout=120",
             "reference_images=1.png", "reference_images=2.png"]  # fmt: skip
    assert not generate("a cat", "-o", "a.mp4", *(part for word in words for part in ("--param", word)))
    params, blobs = studio.seen[-1]
    assert (params["flow_shift"], params["max_sequence_length"]) == (5.0, 64)
    assert params["preview"] is True
    assert params["negative_prompt"] == "1"
    assert [blobs[item["blob"]] for item in params["reference_images"]] == [png(1), png(2)]
    assert not generate("a cat", "-o", "a.png", "--param", "flow_shift=2.5", "--param", "seed=4")
    assert (studio.seen[-1][0]["flow_shift"], studio.seen[-1][0]["seed"]) == (2.5, 4)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--param", "flow_shift=much"], "--param flow_shift=much: must be a number"),
        (["--param", "max_sequence_length=1.5"], "--param max_sequence_length=1.5: must be an integer"),
        (["--param", "preview=perhaps"], "--param preview=perhaps: must be true or false"),
        (["--param", "flow_shfit=5"], "did you mean 'flow_shift'?"),
        (["--param", "flow_shift=1", "--param", "flow_shift=2"], "flow_shift is given twice"),
        (["--seed", "3", "--param", "seed=4"], "--param seed: is given twice"),
        (["--param", "num_inference_steps=0"], "num_inference_steps=0: must be 1 to 100"),
        (["--param", "n=2"], "--param n=2: cannot be said; one file is made"),
        (["--param", "timeout=2"], "queue_timeout and run_timeout"),
        (["--param", "reference_images=no.png"], "--param reference_images no.png: cannot be read: No such file"),
        (["--image", "no.png"], "--image no.png: cannot be read: No such file"),
        (["--mask", "."], "--mask .: cannot be read: Is a directory"),
        ([], "prompt: is required"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    studio: Any, folder: Path, generate: Callable[..., str], words: list[str], complaint: str
) -> None:
    before = len(studio.seen)
    prompt = ["a cat"] if words else []
    assert complaint in generate(*prompt, "-o", "a.mp4", *words)
    assert len(studio.seen) == before
    assert not (folder / "a.mp4").exists()


def test_a_parameter_needs_a_name_and_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "a", "-o", "a.mp4", "--param", "flow_shift"])
    assert "'flow_shift': must be NAME=VALUE, e.g. flow_shift=5" in capsys.readouterr().err


def test_a_model_without_prompt_is_asked_with_a_picture_alone(
    make_house: Callable[..., Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = live_house.schema(with_count=True)
    params = tuple(param for param in schema.params if param.name != "prompt")
    with make_house(accepts=msgspec.structs.replace(schema, params=params)) as house:
        for output in ("a.mp4", "a.png"):
            assert main(["generate", "-o", output, "--image", "0.png", "--server", house.url]) == 0
            assert house.seen[-1][1] == (png(0),)
        assert main(["generate", "a cat", "-o", "b.mp4", "--image", "0.png", "--server", house.url]) == 2
        assert "takes no prompt" in capsys.readouterr().err
