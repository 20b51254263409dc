"""A lone role warms up on requests whose earlier stages have no weights, and serves real ones as before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from tests.worker.ranks.pair import Ranks
from triptych.config import ModelConfig, Shape
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.parallelism import Parallelism
from triptych.pipeline.load import load_cold, load_pipeline

from .cases import CASES
from .harness import Trio, finish, lone_folder
from .parity import picture, png

FRAMES = {"wan22_t2v": 5, "wan_i2v": 5, "qwen_t2i": 1, "z_image": 1, "hunyuan_video15": 5, "helios": 33}


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize("family", FRAMES)
def test_every_lone_role_can_be_warmed_up(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triptych")
    shape = Shape(width=32, height=32, frames=FRAMES[family])
    for role in ROLES:
        folder = lone_folder(checkpoint(family), role, tmp_path / role, keeps=("vae",) if role is Role.ENCODER else ())
        config = ModelConfig(path=str(folder), device="cpu", warmup=(shape,))
        load_pipeline(config, (role,), "cpu")
    assert caplog.text.count(f"warmed up for {shape} in") == len(ROLES)


@pytest.mark.parametrize(
    "family",
    ["flux_kontext", "flux2", pytest.param("flux2_klein", marks=pytest.mark.families)],  # the same blocks
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_picture_that_a_request_may_begin_with_is_warmed_up_too(
    family: str, alone: bool, checkpoint: Callable[[str], Path]
) -> None:
    """Symptom: the first request with a picture found its shape, which had been declared, not compiled."""
    path, roles = str(checkpoint(family)), (Role.DENOISER,) if alone else ROLES
    config = ModelConfig(path=path, device="cpu", warmup=(Shape(width=64, height=64),))
    pipeline, warm_up = load_cold(config, roles, "cpu")
    seen: set[tuple[int, ...]] = set()

    def note(_module: object, _args: object, kwargs: dict[str, Any]) -> None:
        seen.add(tuple(kwargs["hidden_states"].shape))

    transformer: Any = pipeline.component(Role.DENOISER, "transformer")
    transformer.register_forward_pre_hook(note, with_kwargs=True)
    warm_up(pipeline)
    warm = set(seen)
    seen.clear()
    others = load_pipeline(ModelConfig(path=path, device="cpu"), ROLES, "cpu")
    trio = Trio.of({role: pipeline if role in roles else others for role in ROLES})
    request, _ = CASES[family].asked()
    image = pipeline.schema.param("image")
    assert image is not None
    request |= {"width": 64, "height": 64, "image": [{"blob": 0}] if image.type == "images" else {"blob": 0}}
    trio.generate(request, [png(picture(request, 1))])
    assert seen <= warm
    assert len(warm) > len(seen)


def test_a_shape_that_the_model_cannot_have_is_refused_by_name() -> None:
    config = ModelConfig(path="tiny", device="cpu", warmup=(Shape(width=100, height=64, frames=5),))
    with pytest.raises(ConfigError, match="warmup=100x64x5: width=100"):
        load_pipeline(config, ROLES, "cpu")


def test_several_outputs_of_a_request_are_warmed_up_together(checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig(path=str(checkpoint("qwen_t2i")), device="cpu", warmup=(Shape(width=32, height=32, count=2),))
    pipeline, warm_up = load_cold(config, ROLES, "cpu")
    batches: set[int] = set()
    transformer: Any = pipeline.component(Role.DENOISER, "transformer")
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: batches.add(len(kwargs["hidden_states"])), with_kwargs=True
    )
    warm_up(pipeline)
    assert batches == {2}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers", "ignore::FutureWarning:diffusers")
def test_a_model_that_is_split_by_replay_is_warmed_up_whole_or_refused(
    classic_checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triptych")
    path = str(classic_checkpoint("stable_diffusion"))
    config = ModelConfig(path=path, device="cpu", warmup=(Shape(width=64, height=32),))
    load_pipeline(config, ROLES, "cpu")
    assert "warmed up for 64x32 in" in caplog.text
    with pytest.raises(ConfigError, match="without the encoder this model's other roles cannot be warmed up"):
        load_pipeline(config, (Role.DENOISER,), "cpu")


def test_a_request_s_steps_do_nothing_that_the_warm_up_has_not_done(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, int]] = set()
    for name in ("multistep_uni_p_bh_update", "multistep_uni_c_bh_update"):
        update = getattr(UniPCMultistepScheduler, name)

        def noted(self: Any, *args: Any, order: int, name: str = name, update: Any = update, **kwargs: Any) -> Any:
            seen.add((name, order))
            return update(self, *args, order=order, **kwargs)

        monkeypatch.setattr(UniPCMultistepScheduler, name, noted)
    shape = Shape(width=32, height=32, frames=5)
    pipeline = load_pipeline(ModelConfig(path=str(checkpoint("wan_t2v")), device="cpu", warmup=(shape,)), ROLES, "cpu")
    warm, request = set(seen), {"prompt": "a cat", "width": 32, "height": 32, "num_frames": 5}
    result = finish(pipeline.start(Role.ENCODER, request | {"num_inference_steps": 6}, [], []))
    inputs = [(output.tree, output.tensors) for output in result.outputs if output.consumer is Role.DENOISER]
    finish(pipeline.start(Role.DENOISER, request | {"num_inference_steps": 6}, inputs, []))
    assert seen == warm


@pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers", "ignore::FutureWarning:diffusers")
@pytest.mark.parametrize(("scale", "batches"), [(None, {1, 2}), (1.0, {1})])
def test_forwards_without_guidance_are_warmed_up_where_branches_are_joined(
    classic_checkpoint: Callable[[str], Path], scale: float | None, batches: set[int]
) -> None:
    path, defaults = str(classic_checkpoint("stable_diffusion")), {} if scale is None else {"guidance_scale": scale}
    config = ModelConfig(path=path, device="cpu", warmup=(Shape(width=64, height=32),), defaults=defaults)
    pipeline, warm_up = load_cold(config, ROLES, "cpu")
    seen: set[int] = set()
    unet = pipeline.component(Role.DENOISER, "unet")
    unet.register_forward_pre_hook(lambda _module, inputs: seen.add(len(inputs[0])))
    warm_up(pipeline)
    assert seen == batches


def test_texts_of_all_lengths_are_warmed_up_where_ranks_share_the_tokens(checkpoint: Callable[[str], Path]) -> None:
    """Symptom: the first text of a length that divides, or does not, when both texts of the warm-up were of the other
    kind, was compiled for while its request waited."""
    shape = Shape(width=32, height=32)
    ranks = Ranks(Parallelism(cfg=1, sp=2), path=str(checkpoint("qwen_t2i")), roles=(Role.DENOISER,), warmup=(shape,))
    try:
        lengths: set[int] = set()
        transformer = ranks.rank0.component(Role.DENOISER, "transformer")
        transformer.txt_in.register_forward_pre_hook(lambda _module, args: lengths.add(args[0].shape[1]))
        ranks.warm_up()
        assert sum(length % 2 == 0 for length in lengths) >= 2
        assert sum(length % 2 == 1 for length in lengths) >= 2
    finally:
        ranks.close()
