"""Classic pipelines by record and replay: three processes' worth of roles against the whole pipeline, bit for bit.

Every family here matches to the last bit in float32 on the CPU. GLM-Image's and Stable Video Diffusion's picture
processors are the Pillow ones, for torchvision is not needed otherwise.
"""

from __future__ import annotations

import inspect
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.config import ModelConfig
from triptych.errors import ModelError, StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.codec import decode_state
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import StageResult, StageRun

from .harness import Inbox, Trio, finish, frames_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]
"""What Diffusers' own code provokes: NumPy arrays of tensors, a deprecated helper, autocast of Mochi's decode."""

VIDEO = {"prompt": "a cat runs", "height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16}
IMAGE = {"prompt": "a red ball", "negative_prompt": "bad dog", "height": 32, "width": 32, "num_inference_steps": 3}

REQUESTS: dict[str, dict[str, Any]] = {
    "cogvideox_t2v": VIDEO | {"negative_prompt": "bad dog", "num_frames": 9, "guidance_scale": 6.0},
    "cogvideox_i2v": VIDEO | {"negative_prompt": "bad dog", "num_frames": 9, "guidance_scale": 6.0, "image": True},
    "svd": {"height": 32, "width": 64, "num_frames": 3, "num_inference_steps": 2, "guidance_scale": 3.0, "fps": 7,
            "image": True},
    "hunyuan_video": VIDEO | {"num_frames": 5, "guidance_scale": 4.0},
    "mochi": VIDEO | {"negative_prompt": "bad dog", "num_frames": 7, "guidance_scale": 4.5},
    "sdxl": IMAGE | {"guidance_scale": 5.0},
    "stable_diffusion": IMAGE | {"guidance_scale": 7.5},
    "pixart_sigma": IMAGE | {"guidance_scale": 4.5, "max_sequence_length": 16},
    "sana": IMAGE | {"guidance_scale": 4.5, "max_sequence_length": 16, "num_inference_steps": 2},
    "glm_image": {"prompt": 'a sign "cat"', "height": 32, "width": 32, "num_inference_steps": 2,
                  "guidance_scale": 1.5, "max_sequence_length": 64},
}  # fmt: skip

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from triptych.pipeline.load import quiet_libraries

    from .classic_checkpoints import CLASSIC_BUILDERS

    quiet_libraries()
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp(family) / "model"
            CLASSIC_BUILDERS[family](built[family])
        return built[family]

    return get


@pytest.fixture(scope="module")
def trios(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trio]:
    """Family -> its three roles, each from a folder that has this role's weight files only."""
    loaded: dict[str, Trio] = {}

    def get(family: str) -> Trio:
        if family not in loaded:
            keeps = ("vae",) if "image" in REQUESTS[family] else ()
            loaded[family] = Trio(checkpoint(family), tmp_path_factory.mktemp(f"{family}-roles"), encoder_keeps=keeps)
        return loaded[family]

    return get


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def asked(request: dict[str, Any], **changes: Any) -> tuple[dict[str, Any], list[bytes]]:
    """A request as the role pipelines take it, with its images."""
    request = request | changes
    if "image" not in request:
        return request, []
    return request | {"image": {"blob": 0}}, [png(request["width"], request["height"])]


def whole(folder: Path, request: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What the uncut pipeline gives for the same request: [output][frame, height, width, channel]."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(folder), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    arguments = dict(request)
    if "image" in arguments:
        arguments["image"] = Image.open(io.BytesIO(png(request["width"], request["height"]))).convert("RGB")
    accepted = inspect.signature(pipeline.__call__).parameters
    if "max_guidance_scale" in accepted:
        arguments["max_guidance_scale"] = arguments.pop("guidance_scale")
    count = arguments.pop("n", 1)
    arguments |= {name: count for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in accepted}
    result = pipeline(**arguments, generator=torch.Generator("cpu").manual_seed(seed), output_type="pil")
    return (
        [frames_of(c) for c in result.frames] if hasattr(result, "frames") else [frames_of([i]) for i in result.images]
    )


@pytest.mark.parametrize("family", REQUESTS)
def test_three_roles_give_the_bytes_of_the_whole_pipeline(
    checkpoint: Checkpoint, trios: Callable[[str], Trio], family: str
) -> None:
    (expected,) = whole(checkpoint(family), REQUESTS[family], seed=7)
    request, images = asked(REQUESTS[family], seed=7)
    (clip,) = trios(family).generate(request, images)
    assert np.array_equal(clip.frames, expected)
    assert clip.frames.std() > 1


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cogvideox_t2v", {"guidance_scale": 1.0, "width": 48, "num_frames": 5}),
        ("hunyuan_video", {"n": 2, "num_inference_steps": 1}),
        ("cogvideox_i2v", {"guidance_scale": 1.0, "height": 48, "num_frames": 17}),
        ("svd", {"guidance_scale": 1.0, "num_frames": 2, "fps": 12}),
        ("sdxl", {"n": 2, "guidance_scale": 1.0, "width": 64}),
        ("sdxl", {"num_inference_steps": 7, "guidance_scale": 12.0, "negative_prompt": None}),
    ],
)
def test_other_requests_match_too(
    checkpoint: Checkpoint, trios: Callable[[str], Trio], family: str, changes: dict[str, Any]
) -> None:
    expected = whole(checkpoint(family), REQUESTS[family] | changes, seed=2**40 + 3)
    request, images = asked(REQUESTS[family], seed=2**40 + 3, **changes)
    clips = trios(family).generate(request, images)
    assert len(clips) == len(expected) == changes.get("n", 1)
    for clip, frames in zip(clips, expected, strict=True):
        assert np.array_equal(clip.frames, frames)


def test_roles_in_one_process_give_the_same_as_three(checkpoint: Checkpoint, trios: Callable[[str], Trio]) -> None:
    request, images = asked(REQUESTS["cogvideox_i2v"], seed=1)
    (expected,) = trios("cogvideox_i2v").generate(request, images)
    one = load_pipeline(ModelConfig(path=str(checkpoint("cogvideox_i2v")), device="cpu"), ROLES, "cpu")
    assert one.roles == ROLES
    (clip,) = Trio.of(dict.fromkeys(ROLES, one)).generate(request, images)
    assert np.array_equal(clip.frames, expected.frames)


def test_a_role_has_its_own_weights_and_stand_ins_for_the_rest(trios: Callable[[str], Trio]) -> None:
    for role, own in (
        (Role.ENCODER, {"text_encoder", "vae"}),
        (Role.DENOISER, {"transformer"}),
        (Role.DECODER, {"vae"}),
    ):
        pipeline = trios("cogvideox_i2v").pipelines[role]
        for name in ("text_encoder", "transformer", "vae"):
            devices = {parameter.device.type for parameter in pipeline.component(role, name).parameters()}
            assert devices == ({"cpu"} if name in own else {"meta"}), (role, name)


def test_a_vae_that_overflows_in_half_precision_is_cast_back_after_each_request(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """SDXL casts its VAE to float32 to decode. The denoiser does so to a stand-in, and stops before the cast back."""
    (expected,) = whole(checkpoint("sdxl"), REQUESTS["sdxl"], seed=7, dtype=torch.float16)
    trio = Trio(checkpoint("sdxl"), tmp_path, dtype="float16")
    for _ in range(2):
        (clip,) = trio.generate(REQUESTS["sdxl"] | {"seed": 7})
        assert np.array_equal(clip.frames, expected)
        for role in ROLES:
            assert trio.pipelines[role].component(role, "vae").dtype == torch.float16


# -- what crosses -----------------------------------------------------------------------------------------------------


def received(inbox: Inbox, role: Role) -> list[torch.Tensor]:
    return [tensor for _, tensors in inbox[role] for tensor in tensors]


def test_only_what_the_pipeline_reads_crosses(trios: Callable[[str], Trio]) -> None:
    """Of four layers' hidden states and a key-value cache, HunyuanVideo reads one layer's."""
    inbox = trios("hunyuan_video").encoded(REQUESTS["hunyuan_video"])
    shapes = [tuple(tensor.shape) for tensor in received(inbox, Role.DENOISER) if tensor.is_floating_point()]
    assert len(shapes) == 2
    assert {len(shape) for shape in shapes} == {2, 3}


def test_embeddings_do_not_go_to_the_decoder(trios: Callable[[str], Trio]) -> None:
    inbox = trios("cogvideox_t2v").encoded(REQUESTS["cogvideox_t2v"])
    assert not received(inbox, Role.DECODER)


def test_a_copy_can_be_used_again(trios: Callable[[str], Trio]) -> None:
    trio, request = trios("cogvideox_t2v"), REQUESTS["cogvideox_t2v"] | {"seed": 3}
    inbox = trio.encoded(request)
    before = [tensor.clone() for tensor in received(inbox, Role.DENOISER)]
    first = denoised(trio.start(Role.DENOISER, request, inbox))
    assert torch.equal(denoised(trio.start(Role.DENOISER, request, inbox)), first)
    assert all(torch.equal(a, b) for a, b in zip(before, received(inbox, Role.DENOISER), strict=True))


def test_another_models_record_is_refused(trios: Callable[[str], Trio]) -> None:
    inbox = trios("mochi").encoded(REQUESTS["mochi"])
    run = trios("hunyuan_video").start(Role.DENOISER, REQUESTS["hunyuan_video"], inbox)
    with pytest.raises(StageError, match="the denoiser"):
        finish(run)


def test_a_missing_input_is_named(trios: Callable[[str], Trio]) -> None:
    trio, request = trios("cogvideox_t2v"), REQUESTS["cogvideox_t2v"]
    inbox = trio.encoded(request)
    with pytest.raises(StageError, match="the decoder's input lacks decode, forms, predictions"):
        trio.start(Role.DECODER, request, inbox)


# -- steps ------------------------------------------------------------------------------------------------------------


def denoised(run: StageRun) -> torch.Tensor:
    return latents_of(finish(run))


def latents_of(result: StageResult) -> torch.Tensor:
    """What a denoiser hands to the decoder."""
    (output,) = result.outputs
    entries, _ = decode_state(output.tree, output.tensors, torch.device("cpu"))
    _, (first, *_) = entries["decode"][0]
    return first[1]


MIXED: list[tuple[str, dict[str, Any]]] = [
    ("cogvideox_t2v", {"seed": 1, "num_inference_steps": 5}),
    ("cogvideox_t2v", {"seed": 2, "width": 48, "guidance_scale": 1.0}),
    ("cogvideox_t2v", {"seed": 1, "num_frames": 5, "guidance_scale": 2.0}),
    ("cogvideox_i2v", {"seed": 3}),
    ("cogvideox_i2v", {"seed": 4, "num_inference_steps": 4}),
    ("glm_image", {"seed": 5, "num_inference_steps": 4}),
]
"""CogVideoX1.5's scheduler draws noise in every step."""


@pytest.fixture(scope="module")
def encoded(trios: Callable[[str], Trio]) -> list[tuple[Trio, dict[str, Any], Inbox]]:
    found: list[tuple[Trio, dict[str, Any], Inbox]] = []
    for family, changes in MIXED:
        request, images = asked(REQUESTS[family], **changes)
        found.append((trios(family), request, trios(family).encoded(request, images)))
    return found


@pytest.fixture(scope="module")
def alone(encoded: list[tuple[Trio, dict[str, Any], Inbox]]) -> list[torch.Tensor]:
    return [denoised(trio.start(Role.DENOISER, request, inbox)) for trio, request, inbox in encoded]


def test_one_advance_is_one_step(encoded: list[tuple[Trio, dict[str, Any], Inbox]]) -> None:
    trio, request, inbox = encoded[0]
    run = trio.start(Role.DENOISER, request, inbox)
    assert (run.step, run.steps) == (0, 0)
    seen: list[tuple[int, int]] = []
    while run.advance() is None:
        seen.append((run.step, run.steps))
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5)]
    assert (run.step, run.steps) == (5, 5)


def test_interleaved_runs_are_bit_identical_to_lone_ones(
    encoded: list[tuple[Trio, dict[str, Any], Inbox]], alone: list[torch.Tensor]
) -> None:
    runs = [trio.start(Role.DENOISER, request, inbox) for trio, request, inbox in encoded]
    done: dict[int, Any] = {}
    while len(done) < len(runs):
        for i, run in enumerate(runs):
            if i not in done and (result := run.advance()) is not None:
                done[i] = result
    for i, expected in enumerate(alone):
        assert torch.equal(latents_of(done[i]), expected)


def test_other_stages_between_two_steps_change_nothing(
    trios: Callable[[str], Trio], encoded: list[tuple[Trio, dict[str, Any], Inbox]], alone: list[torch.Tensor]
) -> None:
    trio, request, inbox = encoded[3]
    run = trio.start(Role.DENOISER, request, inbox)
    run.advance()
    torch.manual_seed(99)
    other, images = asked(REQUESTS["cogvideox_i2v"], seed=9)
    trio.generate(other, images)
    trios("glm_image").encoded(REQUESTS["glm_image"] | {"seed": 11})
    assert torch.equal(denoised(run), alone[3])


def test_runs_leave_torchs_own_random_state_alone(encoded: list[tuple[Trio, dict[str, Any], Inbox]]) -> None:
    trio, request, _ = encoded[5]
    torch.manual_seed(4)
    before = torch.get_rng_state()
    trio.encoded(request)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cancel_leaves_the_others_untouched(
    encoded: list[tuple[Trio, dict[str, Any], Inbox]], alone: list[torch.Tensor]
) -> None:
    kept, cancelled, unbegun = (encoded[i][0].start(Role.DENOISER, *encoded[i][1:]) for i in (0, 1, 2))
    kept.advance()
    cancelled.advance()
    cancelled.cancel()
    cancelled.cancel()
    unbegun.cancel()
    assert torch.equal(denoised(kept), alone[0])
    trio, request, inbox = encoded[1]
    assert torch.equal(denoised(trio.start(Role.DENOISER, request, inbox)), alone[1])
    with pytest.raises(StageError, match="the denoiser run is over"):
        cancelled.advance()


def test_a_finished_run_refuses_to_advance(encoded: list[tuple[Trio, dict[str, Any], Inbox]]) -> None:
    trio, request, inbox = encoded[1]
    run = trio.start(Role.DENOISER, request, inbox)
    finish(run)
    with pytest.raises(StageError, match="the denoiser run is over"):
        run.advance()


def test_an_error_inside_the_model_spares_the_others(
    encoded: list[tuple[Trio, dict[str, Any], Inbox]], alone: list[torch.Tensor]
) -> None:
    trio, request, inbox = encoded[0]
    other = trio.start(Role.DENOISER, encoded[1][1], encoded[1][2])
    other.advance()
    run = trio.start(Role.DENOISER, request, inbox)
    run.advance()

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = trio.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer").register_forward_hook(fails)
    with pytest.raises(StageError, match="the denoiser ran out of memory") as caught:
        run.advance()
    hook.remove()
    assert caught.value.retryable
    assert torch.equal(denoised(other), alone[1])


# -- refusals ---------------------------------------------------------------------------------------------------------


def renamed(folder: Path, target: Path, pipeline: str) -> Path:
    shutil.copytree(folder, target)
    index = json.loads((target / "model_index.json").read_text())
    (target / "model_index.json").write_text(json.dumps(index | {"_class_name": pipeline}))
    return target


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("HunyuanVideoFramepackPipeline", r"its step loop calls vae.decode, so denoiser and decoder are not apart"),
        ("CogVideoXVideoToVideoPipeline", "it works on video, which requests cannot carry"),
    ],
)
def test_a_pipeline_that_cannot_be_split_is_refused_at_load(
    checkpoint: Checkpoint, tmp_path: Path, pipeline: str, reason: str
) -> None:
    folder = renamed(checkpoint("hunyuan_video"), tmp_path / "model", pipeline)
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=f"{pipeline} cannot be split: {reason}"):
        load_pipeline(ModelConfig(path=str(folder), device="cpu"), ROLES, "cpu")


def test_missing_weights_are_an_error_that_names_the_component(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = renamed(checkpoint("mochi"), tmp_path / "model", "MochiPipeline")
    for file in (folder / "vae").glob("*.safetensors"):
        file.unlink()
    load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.DENOISER,), "cpu")
    with pytest.raises(ModelError, match="component 'vae' cannot be loaded"):
        load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.DECODER,), "cpu")


def test_a_role_that_is_not_loaded_cannot_start(trios: Callable[[str], Trio]) -> None:
    with pytest.raises(StageError, match="the denoiser is not loaded here, only encoder"):
        trios("mochi").pipelines[Role.ENCODER].start(Role.DENOISER, REQUESTS["mochi"], [], ())
