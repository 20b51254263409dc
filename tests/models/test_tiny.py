"""The embedded model does what its prompts say, measured with nothing but colours, areas and centroids."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from numpy.typing import NDArray

from triptych.models import EMBEDDED, tiny_path

FOLDER = tiny_path()
SETTINGS = json.loads((FOLDER / "triptych.json").read_text())
PALETTE = {
    "red": (214, 32, 40),
    "green": (36, 158, 66),
    "blue": (42, 78, 214),
    "yellow": (248, 224, 52),
    "orange": (250, 126, 22),
    "purple": (134, 46, 178),
    "white": (244, 244, 244),
    "black": (16, 16, 16),
    "gray": (128, 128, 128),
}
# Share of its bounding box that an upright shape fills: 0.38, 0.5, 0.79 and 1 if drawn exactly.
FILLS = {"star": (0.25, 0.44), "triangle": (0.44, 0.64), "circle": (0.64, 0.88), "square": (0.88, 1.0)}

Frames = NDArray[np.float32]


@dataclass(frozen=True)
class Wanted:
    """A prompt and what it asks for. None of the combinations was shown in training."""

    prompt: str
    shape: str
    colour: str
    background: str
    motion: str


WANTED = [
    Wanted("an orange circle moving left on a gray background", "circle", "orange", "gray", "left"),
    Wanted("a blue star moving up on a white background", "star", "blue", "white", "up"),
    Wanted("a purple triangle moving right on a yellow background", "triangle", "purple", "yellow", "right"),
    Wanted("a black square shrinking on an orange background", "square", "black", "orange", "shrinking"),
    Wanted("an orange triangle growing on a white background", "triangle", "orange", "white", "growing"),
    Wanted("a green square standing still on a black background", "square", "green", "black", "still"),
]
SHORT = {"num_frames": 9, "num_inference_steps": 12, "height": 128, "width": 128, "max_sequence_length": 64}
GUIDANCE = SETTINGS["defaults"]["guidance_scale"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other when the cores are shared
    pipeline: Any = WanPipeline.from_pretrained(FOLDER, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    yield pipeline
    torch.set_num_threads(threads)


def generate(pipe: Any, prompt: str, seed: int = 0, **settings: Any) -> Frames:
    """One clip [frames, height, width, 3] in [0, 1]."""
    options = SHORT | {"guidance_scale": GUIDANCE} | settings
    generator = torch.Generator().manual_seed(seed)
    return pipe(prompt, generator=generator, output_type="np", **options).frames[0]


@pytest.fixture(scope="module")
def clips(pipe: Any) -> dict[str, Frames]:
    return {wanted.prompt: generate(pipe, wanted.prompt) for wanted in WANTED}


def nearest_colour(rgb: Frames) -> str:
    return min(PALETTE, key=lambda name: float(np.square(np.array(PALETTE[name]) / 255 - rgb).sum()))


def measure(clip: Frames) -> tuple[Frames, Frames, NDArray[np.bool_]]:
    """Colours of background and shape, and where the shape is [frames, height, width]."""
    background = np.median(np.concatenate([clip[:, 0], clip[:, -1]]).reshape(-1, 3), 0)
    distance = np.linalg.norm(clip - background, axis=-1)
    shape = np.median(clip[distance > 0.7 * distance.max()], 0)
    return background, shape, distance > 0.5 * np.linalg.norm(shape - background)


def fill_ratio(mask: NDArray[np.bool_]) -> float:
    ys, xs = np.nonzero(mask)
    return float(mask.sum() / ((np.ptp(ys) + 1) * (np.ptp(xs) + 1)))


def motion(masks: NDArray[np.bool_]) -> str:
    first, last = (np.argwhere(mask) for mask in (masks[0], masks[-1]))
    down, right = (last.mean(0) - first.mean(0)) / masks.shape[1:]
    if max(abs(down), abs(right)) > 0.1:
        return ("right" if right > 0 else "left") if abs(right) > abs(down) else ("down" if down > 0 else "up")
    growth = len(last) / len(first)
    return "growing" if growth > 1.5 else "shrinking" if growth < 1 / 1.5 else "still"


@pytest.mark.parametrize("wanted", WANTED, ids=lambda w: w.prompt)
def test_a_clip_shows_what_the_prompt_asks_for(clips: dict[str, Frames], wanted: Wanted) -> None:
    background, shape, masks = measure(clips[wanted.prompt])

    assert nearest_colour(background) == wanted.background
    assert nearest_colour(shape) == wanted.colour
    low, high = FILLS[wanted.shape]
    assert low <= np.median([fill_ratio(mask) for mask in masks]) <= high
    assert motion(masks) == wanted.motion


def test_the_default_settings_give_the_default_clip(pipe: Any) -> None:
    defaults = {name: value for name, value in SETTINGS["defaults"].items() if name != "fps"}
    clip = generate(pipe, "a red circle moving right on a blue background", **defaults)

    assert clip.shape == (17, 128, 128, 3)
    background, shape, masks = measure(clip)
    assert (nearest_colour(background), nearest_colour(shape), motion(masks)) == ("blue", "red", "right")


def test_one_frame_gives_an_image(pipe: Any) -> None:
    image = generate(pipe, "a picture of a white circle on a red background", num_frames=1)

    assert image.shape == (1, 128, 128, 3)
    background, shape, _ = measure(image)
    assert (nearest_colour(background), nearest_colour(shape)) == ("red", "white")


def test_guidance_changes_the_picture_and_its_absence_is_not_fatal(pipe: Any) -> None:
    prompt = "a green triangle on a purple background"
    guided, free = (generate(pipe, prompt, num_frames=1, guidance_scale=scale) for scale in (GUIDANCE, 1.0))

    assert np.abs(guided - free).mean() > 0.002
    assert nearest_colour(measure(free)[0]) == "purple"


def test_a_negative_prompt_is_heard(pipe: Any) -> None:
    prompt = "a green triangle on a purple background"
    plain = generate(pipe, prompt, num_frames=1)
    told = generate(pipe, prompt, num_frames=1, negative_prompt="a red circle on a white background")

    assert np.abs(plain - told).mean() > 0.002


def test_the_seed_decides_where_the_shape_is(pipe: Any) -> None:
    prompt = "a small yellow square on a black background"
    first, again, other = (generate(pipe, prompt, seed, num_frames=1) for seed in (1, 1, 2))

    np.testing.assert_array_equal(first, again)
    centres = [np.argwhere(measure(clip)[2][0]).mean(0) for clip in (first, other)]
    assert np.abs(centres[0] - centres[1]).max() > 4


def test_longer_padding_of_the_text_keeps_the_meaning(pipe: Any) -> None:
    image = generate(pipe, "a blue circle on an orange background", num_frames=1, max_sequence_length=512)

    background, shape, _ = measure(image)
    assert (nearest_colour(background), nearest_colour(shape)) == ("orange", "blue")


def test_the_folder_is_small_and_holds_no_pickles() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) < 30 * 2**20
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md", ".png"}
    assert EMBEDDED["tiny"] == FOLDER


def test_the_parts_are_stock_classes(pipe: Any) -> None:
    assert type(pipe) is WanPipeline
    assert type(pipe.vae) is AutoencoderKLWan
    assert type(pipe.transformer) is WanTransformer3DModel
    assert pipe.transformer.dtype == torch.float32


def test_the_model_card_tells_the_accuracies_that_the_run_measured() -> None:
    judged = json.loads((FOLDER / "training.json").read_text())["judged"]
    card = (FOLDER / "MODEL_CARD.md").read_text()

    assert min(judged["background"], judged["colour"]) >= 0.98
    assert judged["motion"] >= 0.94
    assert judged["shape"] >= 0.90
    cells = " | ".join(f"{judged[field]:.1%}" for field in ("background", "colour", "shape", "motion", "all"))
    assert f"| defaults | {cells} |" in card
    assert Path(FOLDER / "contact_sheet.png").exists()


def test_the_defaults_lie_within_the_limits() -> None:
    defaults, limits = SETTINGS["defaults"], SETTINGS["limits"]

    assert max(defaults["height"], defaults["width"]) <= limits["max_side"]
    assert defaults["num_frames"] <= limits["max_frames"]
    assert defaults["num_inference_steps"] <= limits["max_steps"]
    assert defaults["max_sequence_length"] <= limits["max_sequence_length"]
