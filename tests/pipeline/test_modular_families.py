"""Image and video families at their modular blocks: three processes' worth of roles against the classic pipeline."""

from __future__ import annotations

import inspect
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from triptych.config import ModelConfig, Task
from triptych.errors import BadRequest, ModelError
from triptych.ids import Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import Clip
from triptych.worker.media import encode_clip

from .classic_harness import png
from .harness import Trio, finish, lone_folder, post
from .modular_image_checkpoints import flux2
from .parity import assert_alike

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
"""Diffusers' Helios scheduler makes NumPy arrays of tensors."""

IMAGE = {"prompt": "a cat", "height": 64, "width": 48, "max_sequence_length": 32, "num_inference_steps": 3}
VIDEO = {"prompt": "a cat runs", "negative_prompt": "bad", "height": 32, "width": 64, "num_inference_steps": 3}

REQUESTS: dict[str, dict[str, Any]] = {
    "sd3": IMAGE | {"negative_prompt": "bad", "guidance_scale": 6.0},
    "sd3_without_t5": IMAGE | {"negative_prompt": "bad", "guidance_scale": 6.0},
    "flux_kontext": IMAGE | {"guidance_scale": 2.5},
    "flux2": IMAGE | {"guidance_scale": 4.0, "max_sequence_length": 256},  # the prompt stands behind 200 tokens
    "flux2_klein": IMAGE,
    "flux2_klein_base": IMAGE | {"guidance_scale": 4.0},
    "ltx": VIDEO | {"num_frames": 9, "guidance_scale": 4.0, "fps": 16, "max_sequence_length": 32},
    "ltx2": VIDEO | {"num_frames": 9, "guidance_scale": 4.0, "fps": 16, "max_sequence_length": 32},
    "helios": VIDEO | {"num_frames": 66, "guidance_scale": 4.0, "max_sequence_length": 32, "num_inference_steps": 2},
    "hunyuan_video15": VIDEO | {"num_frames": 5, "guidance_scale": 4.0},
}  # fmt: skip

WITH_PICTURE = {"ltx": "LTXImageToVideoPipeline", "ltx2": "LTX2ImageToVideoPipeline"}
"""Family to the classic class that begins with a picture."""

MAY_HAVE_PICTURES = ("flux_kontext", "flux2", "flux2_klein", "flux2_klein_base", "helios")
"""Families whose requests may begin with a picture, so that their encoders have the VAE."""

ROUND = ("ltx", "ltx2", "sd3", "sd3_without_t5")
"""Families whose frames may differ from the classic ones by rounding; all others are equal to the last bit.

The classic pipelines of these compute the guided and the unguided branch as one batch, their blocks one after the
other, which rounds differently in the last place.
"""
SOUND_TOLERANCE = 2e-7
"""The same of samples in -1..1; 4.5e-8 was measured."""


@dataclass(frozen=True)
class Both:
    """A family split and whole."""

    trio: Trio
    whole: Any

    def expected(self, request: Mapping[str, Any]) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
        """Frames and sounds of the classic pipeline, one of each an output."""
        arguments = dict(request)
        accepted = inspect.signature(self.whole.__call__).parameters
        generator = torch.Generator("cpu").manual_seed(arguments.pop("seed"))
        count = arguments.pop("n", 1)
        arguments |= {n: count for n in ("num_images_per_prompt", "num_videos_per_prompt") if n in accepted}
        if "max_area" in accepted:  # of which height and width are the aspect
            arguments["max_area"] = arguments["height"] * arguments["width"]
        if "frame_rate" in accepted:
            arguments["frame_rate"] = float(arguments.pop("fps"))
        if "guidance_scale" in arguments and "guidance_scale" not in accepted:
            self.whole.guider = self.whole.guider.new(guidance_scale=arguments.pop("guidance_scale"))
        output = self.whole(**arguments, generator=generator, output_type="pt")
        frames = output.frames if "frames" in output else output.images[:, None]
        pixels = (frames * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
        sounds = [] if getattr(output, "audio", None) is None else [sound.float().numpy() for sound in output.audio]
        return list(pixels), sounds

    def check(self, family: str, request: Mapping[str, Any]) -> tuple[Clip, ...]:
        clips = self.trio.generate(request)
        pixels, sounds = self.expected(request)
        assert len(clips) == len(pixels)
        for clip, frames in zip(clips, pixels, strict=True):
            assert clip.frames.shape == frames.shape
            assert clip.frames.std() > 1, "a flat picture proves nothing"
            assert_alike(clip.frames, frames, rounds=family in ROUND)
        for clip, samples in zip(clips, sounds, strict=False):
            assert clip.audio is not None
            assert clip.audio.shape == samples.shape
            assert clip.audio.std() > 0.001
            assert np.abs(clip.audio - samples).max() <= SOUND_TOLERANCE
        return clips


@pytest.fixture(scope="module")
def both(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    from diffusers import DiffusionPipeline

    made: dict[str, Both] = {}

    def get(family: str) -> Both:
        if family not in made:
            folder = checkpoint(family)
            absent = dict.fromkeys(("text_encoder_3", "tokenizer_3")) if family == "sd3_without_t5" else {}
            whole: Any = DiffusionPipeline.from_pretrained(str(folder), **absent)
            whole.set_progress_bar_config(disable=True)
            work, keeps = tmp_path_factory.mktemp(family), ("vae",) if family in MAY_HAVE_PICTURES else ()
            made[family] = Both(Trio(folder, work, encoder_keeps=keeps), whole)
        return made[family]

    return get


@pytest.mark.parametrize("family", REQUESTS)
def test_split_is_the_classic_pipeline(both: Callable[[str], Both], family: str) -> None:
    both(family).check(family, REQUESTS[family] | {"seed": 7})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("sd3", {"guidance_scale": 1.0, "width": 64}),
        ("sd3", {"n": 2, "negative_prompt": None}),
        ("flux2", {"n": 2, "height": 32, "guidance_scale": 1.0}),
        ("flux2_klein", {"n": 2, "num_inference_steps": 1}),
        ("flux2_klein_base", {"guidance_scale": 1.0}),
        ("flux2_klein_base", {"n": 2, "height": 32}),
        ("ltx", {"guidance_scale": 1.0, "fps": 30}),
        ("ltx", {"num_frames": 1, "height": 64}),
        ("ltx2", {"guidance_scale": 1.0, "fps": 25}),
        ("ltx2", {"audio_guidance_scale": 2.0, "num_frames": 5, "n": 2}),
        ("helios", {"guidance_scale": 1.0, "num_frames": 33}),
        ("hunyuan_video15", {"guidance_scale": 1.0}),
        ("hunyuan_video15", {"guidance_scale": 9.0, "num_inference_steps": 2, "num_frames": 1}),
    ],
)
def test_other_requests_match_too(both: Callable[[str], Both], family: str, changes: dict[str, Any]) -> None:
    both(family).check(family, REQUESTS[family] | changes | {"seed": 2**40 + 3})


@pytest.mark.vision
def test_flux2_with_the_processor_of_published_models(tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    flux2(tmp_path / "model", with_processor=True)
    whole: Any = DiffusionPipeline.from_pretrained(str(tmp_path / "model"))
    whole.set_progress_bar_config(disable=True)
    trio = Trio(tmp_path / "model", tmp_path / "roles", encoder_keeps=("vae",))
    Both(trio, whole).check("flux2", REQUESTS["flux2"] | {"seed": 7})


@pytest.mark.parametrize("family", ["ltx", "helios", "hunyuan_video15"])
def test_a_pipeline_that_fits_one_output_is_asked_for_one(both: Callable[[str], Both], family: str) -> None:
    """Diffusers gives LTX's VAE one timestep a prompt, also where a prompt has two outputs; Helios has one history."""
    with pytest.raises(BadRequest, match="n=2"):
        both(family).trio.generate(REQUESTS[family] | {"n": 2})


@pytest.mark.parametrize("family", WITH_PICTURE)
def test_a_clip_may_begin_with_a_picture(both: Callable[[str], Both], tmp_path: Path, family: str) -> None:
    """With the same weights, by --task."""
    import diffusers

    parts = both(family).whole.components
    folder = tmp_path / "model"
    both(family).whole.save_pretrained(folder)
    trio = Trio(folder, tmp_path / "roles", encoder_keeps=("vae",), task="image-to-video")
    whole = getattr(diffusers, WITH_PICTURE[family])(**parts)
    whole.set_progress_bar_config(disable=True)
    picture = png(64, 32)
    request = REQUESTS[family] | {"seed": 3, "image": {"blob": 0}}
    (clip,) = trio.generate(request, [picture])
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    (frames,), sounds = Both(trio, whole).expected(request | {"image": image})
    assert trio.pipelines[Role.ENCODER].schema.task == "image-to-video"
    assert_alike(clip.frames, frames, rounds=family in ROUND)
    assert all(np.abs(clip.audio - samples).max() <= SOUND_TOLERANCE for samples in sounds)


@pytest.mark.parametrize(
    ("family", "changes", "sizes"),
    [
        ("flux_kontext", {"num_inference_steps": 1}, [(96, 64)]),
        ("flux2", {"n": 2}, [(96, 64), (64, 64)]),
        ("flux2", {"height": None, "width": None}, [(96, 64), (64, 64)]),
        ("flux2_klein", {}, [(100, 70)]),
        ("flux2_klein", {"height": None, "width": None}, [(100, 70)]),
        ("flux2_klein_base", {"guidance_scale": 3.0}, [(64, 80)]),
        ("helios", {"num_frames": 33}, [(64, 32)]),
    ],
)
def test_a_picture_that_may_be_given_is_used_as_by_the_classic_pipeline(
    both: Callable[[str], Both], family: str, changes: dict[str, Any], sizes: list[tuple[int, int]]
) -> None:
    """By the same roles as text alone. A size that is not asked for is the picture's."""
    trio = both(family).trio
    files = [png(*size, seed=number) for number, size in enumerate(sizes)]
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    request = {name: value for name, value in (REQUESTS[family] | changes).items() if value is not None} | {"seed": 5}
    several = trio.pipelines[Role.ENCODER].schema.param("image").type == "images"
    blobs = [{"blob": number} for number in range(len(files))]
    clips = trio.generate(request | {"image": blobs if several else blobs[0]}, files)
    expected, _ = both(family).expected(request | {"image": pictures if several else pictures[0]})
    assert len(clips) == len(expected)
    for clip, frames in zip(clips, expected, strict=True):
        assert clip.frames.std() > 1
        assert clip.frames.shape == frames.shape
        assert_alike(clip.frames, frames, rounds=family in ROUND)
    if "height" in request:
        without = trio.generate(request)
        assert (clips[0].frames != without[0].frames).any()


@pytest.mark.parametrize("size", [(63, 64), (64, 520)])
def test_a_picture_that_the_pipeline_would_refuse_is_the_callers_fault(
    both: Callable[[str], Both], size: tuple[int, int]
) -> None:
    request = REQUESTS["flux2_klein"] | {"seed": 1, "image": [{"blob": 0}]}
    with pytest.raises(BadRequest, match=f"image: the picture is {size[0]}x{size[1]}; this model takes"):
        both("flux2_klein").trio.encoded(request, [png(*size)])


@pytest.mark.parametrize(
    ("task", "required", "loads"), [(None, False, True), ("image-to-image", True, True), ("text-to-image", None, False)]
)
def test_a_task_says_whether_there_is_a_picture(
    checkpoint: Callable[[str], Path], tmp_path: Path, task: Task | None, required: bool | None, loads: bool
) -> None:
    """One that begins with text does without the VAE's weights in the encoder."""
    folder = lone_folder(checkpoint("flux2_klein"), Role.ENCODER, tmp_path / "model", keeps=("vae",) if loads else ())
    schema = load_pipeline(ModelConfig(path=str(folder), device="cpu", task=task), (Role.ENCODER,), "cpu").schema
    image = schema.param("image")
    assert (None if image is None else image.required) == required
    assert schema.task == (task or "text-to-image")
    height = schema.param("height")
    assert height is not None
    given = {"image": [{"blob": 0}]}
    assert height.default_beside({}) == (None if required else 1024)
    assert height.default_beside(given) == (None if loads else 1024)


def modular_only(folder: Path, target: Path, **changes: Any) -> Path:
    """The model in ``folder`` as a modular pipeline saves it, without the other index."""
    shutil.copytree(folder, target)
    index = json.loads((target / "model_index.json").read_text())
    (target / "model_index.json").unlink()
    for name, entry in index.items():
        if isinstance(entry, list):
            place = {"pretrained_model_name_or_path": "somebody/model", "subfolder": name, "type_hint": entry}
            index[name] = [*entry, place]
    index |= {"_class_name": "Flux2KleinModularPipeline", "_blocks_class_name": "Flux2KleinAutoBlocks"} | changes
    (target / "modular_model_index.json").write_text(json.dumps(index))
    return target


def test_a_folder_with_a_modular_index_alone_is_served(
    both: Callable[[str], Both], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = modular_only(checkpoint("flux2_klein"), tmp_path / "model")
    trio = Trio(folder, tmp_path / "roles", encoder_keeps=("vae",))
    Both(trio, both("flux2_klein").whole).check("flux2_klein", REQUESTS["flux2_klein"] | {"seed": 5})
    assert trio.pipelines[Role.ENCODER].schema.pipeline == "Flux2KleinModularPipeline"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"_blocks_class_name": "MyBlocks"}, "its blocks 'MyBlocks' are not those"),
        (
            {"vae": ["diffusers", "AutoencoderKLFlux2", {"pretrained_model_name_or_path": "a/b", "subfolder": "x"}]},
            "component 'vae': is kept in 'a/b'",
        ),
    ],
)
def test_what_a_modular_index_keeps_elsewhere_is_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = modular_only(checkpoint("flux2_klein"), tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=named):
        load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.DENOISER,), "cpu")


# -- sound ------------------------------------------------------------------------------------------------------------


def test_sound_is_muxed_into_the_file(both: Callable[[str], Both]) -> None:
    (clip,) = both("ltx2").trio.generate(REQUESTS["ltx2"] | {"seed": 1})
    assert clip.sample_rate == 16000
    file = encode_clip(clip, None)
    with av.open(io.BytesIO(file.data)) as container:
        video, sound = container.streams.video[0], container.streams.audio[0]
        assert (sound.codec_context.name, sound.rate, sound.layout.name) == ("aac", 16000, "stereo")
        heard = sum(frame.samples for frame in container.decode(sound)) / sound.rate
        shown = 9 / 16
        assert video.frames == 9
        assert abs(heard - shown) < 0.13, "AAC fills its last frame of 64 ms up, and puts one before"


def test_sound_has_a_guidance_of_its_own(both: Callable[[str], Both]) -> None:
    trio, request = both("ltx2").trio, REQUESTS["ltx2"] | {"seed": 1, "num_inference_steps": 2, "num_frames": 3}
    (plain,), (other,) = trio.generate(request), trio.generate(request | {"audio_guidance_scale": 1.0})
    assert not np.array_equal(plain.audio, other.audio)


def test_only_the_decoder_has_what_makes_sound(both: Callable[[str], Both]) -> None:
    pipelines = both("ltx2").trio.pipelines
    for name in ("audio_vae", "vocoder"):
        assert isinstance(pipelines[Role.DECODER].component(Role.DECODER, name), torch.nn.Module)
        assert not isinstance(pipelines[Role.DENOISER].component(Role.DENOISER, name), torch.nn.Module)


# -- loops over chunks ------------------------------------------------------------------------------------------------


def test_a_loop_over_chunks_stops_at_every_step(both: Callable[[str], Both]) -> None:
    trio, request = both("helios").trio, REQUESTS["helios"] | {"seed": 3}
    run = trio.start(Role.DENOISER, request, trio.encoded(request))
    seen: list[tuple[int, int]] = []
    while run.advance() is None:
        seen.append((run.step, run.steps))
        assert run.checkpoint() is None, "the state of a chunk crosses no cut: such a stage starts again"
    assert seen == [(1, 4), (2, 4), (3, 4)]


def test_interleaved_chunks_are_those_of_runs_alone(both: Callable[[str], Both]) -> None:
    trio = both("helios").trio
    requests = [REQUESTS["helios"] | {"seed": seed, "guidance_scale": scale} for seed, scale in ((3, 4.0), (4, 1.0))]
    alone = [trio.generate(request)[0].frames for request in requests]
    inboxes = [trio.encoded(request) for request in requests]
    first, second = (trio.start(Role.DENOISER, *pair) for pair in zip(requests, inboxes, strict=True))
    first.advance()
    post(finish(second), inboxes[1])
    post(finish(first), inboxes[0])
    for request, inbox, frames in zip(requests, inboxes, alone, strict=True):
        assert np.array_equal(trio.stage(Role.DECODER, request, inbox).clips[0].frames, frames)


def test_a_pyramid_takes_its_steps_by_stages(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The classic class cannot be compared with: it fails on the CPU, where it views what is not contiguous."""
    trio = Trio(checkpoint("helios_pyramid"), tmp_path, encoder_keeps=("vae",))
    request = VIDEO | {"height": 64, "num_frames": 33, "num_inference_steps": 6, "max_sequence_length": 32, "seed": 1}
    inbox = trio.encoded(request)
    run = trio.start(Role.DENOISER, request, inbox)
    assert run.advance() is None
    assert (run.step, run.steps) == (1, 6)
    post(finish(run), inbox)
    assert run.step == 6
    (clip,) = trio.stage(Role.DECODER, request, inbox).clips
    assert clip.frames.shape == (33, 64, 64, 3)
    with pytest.raises(BadRequest, match="num_inference_steps=4: must be a multiple of 3"):
        trio.encoded(request | {"num_inference_steps": 4})


@pytest.mark.parametrize(("frames", "legal"), [(132, True), (100, False)])
def test_only_whole_chunks_can_be_asked_for(both: Callable[[str], Both], frames: int, legal: bool) -> None:
    param = both("helios").trio.pipelines[Role.ENCODER].schema.param("num_frames")
    assert param is not None
    assert param.multiple_of == 33
    assert (frames % param.multiple_of == param.remainder) is legal
