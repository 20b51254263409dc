"""Classic pipelines by record and replay: three processes' worth of roles against the whole pipeline, bit for bit.

Every family here matches to the last bit in float32 on the CPU. GLM-Image's and Stable Video Diffusion's picture
processors are the Pillow ones, for torchvision is not needed otherwise.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.config import ModelConfig
from triptych.errors import ModelError, StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import Resumable

from .classic_harness import REQUESTS, TOLERATED, Checkpoint, Trios, asked, denoised, whole
from .harness import Inbox, Trio, finish

pytestmark = TOLERATED


@pytest.mark.parametrize("family", REQUESTS)
def test_three_roles_give_the_bytes_of_the_whole_pipeline(
    classic_checkpoint: Checkpoint, trios: Trios, family: str
) -> None:
    (expected,) = whole(classic_checkpoint(family), REQUESTS[family], seed=7)
    request, images = asked(REQUESTS[family], seed=7)
    (clip,) = trios(family).generate(request, images)
    assert np.array_equal(clip.frames, expected)
    assert clip.frames.std() > 1


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cogvideox_t2v", {"guidance_scale": 1.0, "width": 48, "num_frames": 5}),
        ("hunyuan_video", {"n": 2, "num_inference_steps": 1}),
        ("hunyuan_video", {"negative_prompt": "bad dog", "true_cfg_scale": 3.0, "num_inference_steps": 2}),
        ("cogvideox_i2v", {"guidance_scale": 1.0, "height": 48, "num_frames": 17}),
        ("svd", {"guidance_scale": 1.0, "num_frames": 2, "fps": 12}),
        ("sdxl", {"n": 2, "guidance_scale": 1.0, "width": 64}),
        ("hunyuan_image", {"guidance_scale": 2.0, "prompt": 'a sign that says "cat"'}),
        ("hunyuan_image", {"guidance_scale": 1.0}),
        ("sdxl", {"num_inference_steps": 7, "guidance_scale": 12.0, "negative_prompt": None}),
    ],
)
def test_other_requests_match_too(
    classic_checkpoint: Checkpoint, trios: Trios, family: str, changes: dict[str, Any]
) -> None:
    expected = whole(classic_checkpoint(family), REQUESTS[family] | changes, seed=2**40 + 3)
    request, images = asked(REQUESTS[family], seed=2**40 + 3, **changes)
    clips = trios(family).generate(request, images)
    assert len(clips) == len(expected) == changes.get("n", 1)
    for clip, frames in zip(clips, expected, strict=True):
        assert np.array_equal(clip.frames, frames)


def test_guidance_of_a_model_that_is_not_distilled_goes_to_its_guider(trios: Trios) -> None:
    trio, request = trios("hunyuan_image"), REQUESTS["hunyuan_image"] | {"seed": 7}
    scale = next(param for param in trio.pipelines[Role.ENCODER].schema.params if param.name == "guidance_scale")
    assert scale.default == 3.5
    guided, more = (trio.generate(request | {"guidance_scale": scale})[0].frames for scale in (2.0, 12.0))
    assert not np.array_equal(guided, more)


def test_roles_in_one_process_give_the_same_as_three(classic_checkpoint: Checkpoint, trios: Trios) -> None:
    request, images = asked(REQUESTS["cogvideox_i2v"], seed=1)
    (expected,) = trios("cogvideox_i2v").generate(request, images)
    one = load_pipeline(ModelConfig(path=str(classic_checkpoint("cogvideox_i2v")), device="cpu"), ROLES, "cpu")
    assert one.roles == ROLES
    (clip,) = Trio.of(dict.fromkeys(ROLES, one)).generate(request, images)
    assert np.array_equal(clip.frames, expected.frames)


def test_a_role_has_its_own_weights_and_stand_ins_for_the_rest(trios: Trios) -> None:
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
    classic_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """SDXL casts its VAE to float32 to decode. The denoiser does so to a stand-in, and stops before the cast back."""
    (expected,) = whole(classic_checkpoint("sdxl"), REQUESTS["sdxl"], seed=7, dtype=torch.float16)
    trio = Trio(classic_checkpoint("sdxl"), tmp_path, dtype="float16")
    for _ in range(2):
        (clip,) = trio.generate(REQUESTS["sdxl"] | {"seed": 7})
        assert np.array_equal(clip.frames, expected)
        for role in ROLES:
            assert trio.pipelines[role].component(role, "vae").dtype == torch.float16


# -- what crosses -----------------------------------------------------------------------------------------------------


def received(inbox: Inbox, role: Role) -> list[torch.Tensor]:
    return [tensor for _, tensors in inbox[role] for tensor in tensors]


@pytest.mark.parametrize("family", ["sdxl", "cogvideox_t2v"])
def test_a_stage_that_is_interrupted_starts_again(trios: Trios, family: str) -> None:
    """Where the pipeline's own call is between two steps cannot be kept."""
    request, images = asked(REQUESTS[family], seed=7)
    run = trios(family).start(Role.DENOISER, request, trios(family).encoded(request, images))
    assert run.advance() is None
    assert not isinstance(run, Resumable)
    run.cancel()


def test_only_what_the_pipeline_reads_crosses(trios: Trios) -> None:
    """Of four layers' hidden states and a key-value cache, HunyuanVideo reads one layer's."""
    inbox = trios("hunyuan_video").encoded(REQUESTS["hunyuan_video"])
    shapes = [tuple(tensor.shape) for tensor in received(inbox, Role.DENOISER) if tensor.is_floating_point()]
    assert len(shapes) == 2
    assert {len(shape) for shape in shapes} == {2, 3}


def test_embeddings_do_not_go_to_the_decoder(trios: Trios) -> None:
    inbox = trios("cogvideox_t2v").encoded(REQUESTS["cogvideox_t2v"])
    assert not received(inbox, Role.DECODER)


def test_a_copy_can_be_used_again(trios: Trios) -> None:
    trio, request = trios("cogvideox_t2v"), REQUESTS["cogvideox_t2v"] | {"seed": 3}
    inbox = trio.encoded(request)
    before = [tensor.clone() for tensor in received(inbox, Role.DENOISER)]
    first = denoised(trio.start(Role.DENOISER, request, inbox))
    assert torch.equal(denoised(trio.start(Role.DENOISER, request, inbox)), first)
    assert all(torch.equal(a, b) for a, b in zip(before, received(inbox, Role.DENOISER), strict=True))


def test_another_models_record_is_refused(trios: Trios) -> None:
    inbox = trios("mochi").encoded(REQUESTS["mochi"])
    run = trios("hunyuan_video").start(Role.DENOISER, REQUESTS["hunyuan_video"], inbox)
    with pytest.raises(StageError, match="the denoiser"):
        finish(run)


def test_a_missing_input_is_named(trios: Trios) -> None:
    trio, request = trios("cogvideox_t2v"), REQUESTS["cogvideox_t2v"]
    inbox = trio.encoded(request)
    with pytest.raises(StageError, match="the decoder's input lacks decode, forms, predictions"):
        trio.start(Role.DECODER, request, inbox)


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
    classic_checkpoint: Checkpoint, tmp_path: Path, pipeline: str, reason: str
) -> None:
    folder = renamed(classic_checkpoint("hunyuan_video"), tmp_path / "model", pipeline)
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=f"{pipeline} cannot be split: {reason}"):
        load_pipeline(ModelConfig(path=str(folder), device="cpu"), ROLES, "cpu")


def test_missing_weights_are_an_error_that_names_the_component(classic_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = renamed(classic_checkpoint("mochi"), tmp_path / "model", "MochiPipeline")
    for file in (folder / "vae").glob("*.safetensors"):
        file.unlink()
    load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.DENOISER,), "cpu")
    with pytest.raises(ModelError, match="component 'vae' cannot be loaded"):
        load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.DECODER,), "cpu")


def test_a_role_that_is_not_loaded_cannot_start(trios: Trios) -> None:
    with pytest.raises(StageError, match="the denoiser is not loaded here, only encoder"):
        trios("mochi").pipelines[Role.ENCODER].start(Role.DENOISER, REQUESTS["mochi"], [], ())
