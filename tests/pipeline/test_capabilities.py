"""The table of what can be split: what it says, and that the document says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.errors import ModelError
from triptych.ids import Role
from triptych.pipeline.capabilities import (
    TESTED,
    Split,
    capabilities,
    capability_of,
    markdown,
    model_capability,
    model_parts,
    parts_table,
    table,
)

from .checkpoints import BUILDERS
from .classic_checkpoints import CLASSIC_BUILDERS
from .modular_image_checkpoints import IMAGE_BUILDERS
from .modular_video_checkpoints import VIDEO_BUILDERS
from .test_control import CONTROLLED
from .test_edits import FAMILIES as EDITS
from .test_modular_families import WITH_PICTURE
from .wan_checkpoints import WAN_BUILDERS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers"),
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
]
"""Schedulers of Diffusers use NumPy in ways that it warns of."""

ALL = BUILDERS | CLASSIC_BUILDERS | IMAGE_BUILDERS | VIDEO_BUILDERS | WAN_BUILDERS
VISION = {"QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImageLayeredPipeline"}
"""Built in the environment with torchvision only."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
def test_the_document_is_fresh() -> None:
    """Otherwise: python -m triptych.pipeline.capabilities > docs/models.md"""
    assert DOCUMENT.read_text() == markdown(capabilities())


@pytest.mark.parametrize(
    ("pipeline", "split", "task", "blocks", "also", "ways"),
    [
        ("WanPipeline", "modular", "text-to-video", "WanModularPipeline", "",
         "cfg ulysses ring tp encoder-tp decoder-tp"),
        ("WanImageToVideoPipeline", "modular", "image-to-video", "WanImage2VideoModularPipeline", "",
         "cfg ulysses ring tp encoder-tp decoder-tp"),
        ("QwenImageEditPipeline", "modular", "image-to-image", "QwenImageEditModularPipeline", "inpainting",
         "cfg ulysses ring decoder-tp"),
        ("LTX2Pipeline", "modular", "text-to-video", "LTX2ModularPipeline", "image-to-video", "cfg"),
        ("LTXPipeline", "modular", "text-to-video", "LTXModularPipeline", "image-to-video", "cfg ulysses encoder-tp"),
        ("StableDiffusion3Pipeline", "modular", "text-to-image", "StableDiffusion3ModularPipeline",
         "image-to-image inpainting", "cfg encoder-tp"),
        ("CogVideoXPipeline", "replay", "text-to-video", "", "", ""),
        ("StableVideoDiffusionPipeline", "replay", "image-to-video", "", "", ""),
        ("WanVideoToVideoPipeline", "replay", "video-to-video", "", "text-to-video", "ulysses ring tp decoder-tp"),
        ("StableDiffusionXLPipeline", "replay", "text-to-image", "", "image-to-image inpainting", ""),
        # Its family's blocks would leave the image out without a word.
        ("FluxImg2ImgPipeline", "replay", "image-to-image", "", "text-to-image inpainting", "ulysses ring"),
    ],
)  # fmt: skip
def test_how_a_class_is_split(pipeline: str, split: Split, task: str, blocks: str, also: str, ways: str) -> None:
    found = capability_of(pipeline)
    assert (found.pipeline, found.split, found.task, found.blocks) == (pipeline, split, task, blocks)
    assert (" ".join(found.also), " ".join(found.ways)) == (also, ways)


PROMISED = {
    "modular": (
        "WanPipeline", "WanImageToVideoPipeline", "QwenImagePipeline", "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline", "QwenImageLayeredPipeline", "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline",
        "ZImagePipeline", "LTXPipeline", "LTX2Pipeline", "HeliosPipeline", "StableDiffusion3Pipeline",
        "HunyuanVideo15Pipeline",
    ),
    "replay": (
        "WanVACEPipeline", "CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "StableVideoDiffusionPipeline",
        "GlmImagePipeline", "HunyuanVideoPipeline", "MochiPipeline", "StableDiffusionXLPipeline",
        "PixArtSigmaPipeline", "SanaPipeline",
    ),
}  # fmt: skip
"""Classes that whoever reads the README may rely on."""


@pytest.mark.parametrize("split", PROMISED)
def test_the_families_that_people_ask_for_are_served(split: Split) -> None:
    assert {name: capability_of(name).split for name in PROMISED[split]} == dict.fromkeys(PROMISED[split], split)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("HunyuanVideoFramepackPipeline", "its step loop calls vae.decode, so denoiser and decoder are not apart"),
        ("NoSuchPipeline", "Diffusers has no modular pipeline for NoSuchPipeline, nor a classic one"),
    ],
)
def test_a_refused_class_says_why(pipeline: str, reason: str) -> None:
    found = capability_of(pipeline)
    assert (found.split, found.reason) == (None, reason)
    assert reason in table([found])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def get(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "model"
        ALL[family](folder)
        for file in folder.rglob("*.safetensors"):
            file.unlink()
        return folder

    return get


def test_the_classes_marked_as_tested_are_those_that_tests_build(built: Callable[[str], Path]) -> None:
    compared = ALL.keys() - {"helios_pyramid"}
    classes = {json.loads((built(family) / "model_index.json").read_text())["_class_name"] for family in compared}
    classes |= {kind for _, kind, *_ in EDITS.values()} | set(WITH_PICTURE.values())
    assert classes | VISION | CONTROLLED == TESTED


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("wan22_t2v", "cfg ulysses ring tp encoder-tp decoder-tp"),
        ("wan22_ti2v", "ulysses ring tp"),  # replayed, with another VAE
        ("flux2_klein", "ulysses ring"),  # distilled
        ("sd3_without_t5", "cfg"),
    ],
)
def test_what_gpus_share_of_one_model_is_read_off_its_folder(
    family: str, ways: str, built: Callable[[str], Path]
) -> None:
    assert " ".join(model_capability(str(built(family))).ways) == ways


def test_the_parts_of_a_modular_model(built: Callable[[str], Path]) -> None:
    parts = {part.block: part for part in model_parts(str(built("wan_t2v")))}
    assert parts["text_encoder"].role is Role.ENCODER
    assert {"text_encoder", "tokenizer"} <= set(parts["text_encoder"].components)
    assert "vae" in parts["decode"].components
    denoiser = {name for part in parts.values() if part.role is Role.DENOISER for name in part.components}
    assert denoiser == {"transformer", "scheduler"}


def test_the_parts_of_a_replayed_model(built: Callable[[str], Path]) -> None:
    parts = {part.role: part for part in model_parts(str(built("svd")))}
    assert parts[Role.ENCODER].components == ("image_encoder", "vae")
    assert parts[Role.DENOISER].components == ("unet",)
    assert parts[Role.DECODER].components == ("vae",)
    shown = parts_table(parts.values()).splitlines()
    assert shown[0].split() == ["ROLE", "BLOCK", "COMPONENTS"]
    assert [line.split()[0] for line in shown[1:]] == ["encoder", "denoiser", "decoder"]


def test_a_model_that_cannot_be_split_says_why(built: Callable[[str], Path]) -> None:
    folder = built("hunyuan_video")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "HunyuanVideoFramepackPipeline"}))
    with pytest.raises(ModelError, match="HunyuanVideoFramepackPipeline cannot be split: its step loop"):
        model_parts(str(folder))
