"""Quantised roles, where torchao is there: it takes effect, for the role that it was asked for, and is lossy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline, WanPipeline

from triptych.accel.quant import quantise
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline

from .adapters import adapter
from .checkpoints import t5_tokenizer, wan_parts, wan_transformer
from .classic_checkpoints import cogvideox_transformer, cogvideox_vae
from .classic_harness import REQUESTS, TOLERATED
from .classic_parts import t5
from .harness import Trio

REQUEST: dict[str, Any] = {
    "prompt": "a cat", "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 32,
    "seed": 4,
}  # fmt: skip

pytestmark = [*TOLERATED, pytest.mark.quant]
pytest.importorskip("torchao", reason="make test-vision has it")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan whose layers are wide enough to be worth quantising."""
    folder = tmp_path_factory.mktemp("wide")
    transformer = wan_transformer(attention_head_dim=128, ffn_dim=1024)
    WanPipeline(**wan_parts(), transformer=transformer).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


def trio(folder: Path, **settings: Any) -> Trio:
    whole: Any = load_pipeline(ModelConfig(path=str(folder), device="cpu", **settings), ROLES, "cpu")
    return Trio.of(dict.fromkeys(ROLES, whole))


def weight_bytes(model: torch.nn.Module) -> int:
    """Of the weights as they are stored, whatever they stand for."""
    total = 0
    for parameter in model.parameters():
        inner = [getattr(parameter, name) for name in getattr(parameter, "tensor_data_names", ())]
        total += sum(part.numel() * part.element_size() for part in inner or [parameter])
    return total


def test_int8_makes_the_denoiser_small_and_its_result_a_little_different(wide: Path) -> None:
    stock, small = trio(wide), trio(wide, quant={Role.DENOISER: "int8"})
    before = stock.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    after = small.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    assert weight_bytes(after) < 0.5 * weight_bytes(before)  # blocks have a byte a number, not four
    (expected,), (got,) = stock.generate(REQUEST), small.generate(REQUEST)
    difference = abs(got.frames.astype(int) - expected.frames.astype(int))
    assert 0 < difference.mean() < 8  # of 255
    (again,) = small.generate(REQUEST)
    assert (again.frames == got.frames).all()


def test_only_the_role_that_was_named_is_quantised(wide: Path) -> None:
    stock, small = trio(wide), trio(wide, quant={Role.DENOISER: "int8"})
    assert small.pipelines[Role.DENOISER].fingerprint != stock.pipelines[Role.DENOISER].fingerprint
    assert "int8" in small.pipelines[Role.DENOISER].fingerprint
    encoders = [one.pipelines[Role.ENCODER].component(Role.ENCODER, "text_encoder") for one in (stock, small)]
    assert weight_bytes(encoders[0]) == weight_bytes(encoders[1])


def test_a_role_in_which_nothing_is_wide_enough_is_refused(wide: Path) -> None:
    with pytest.raises(ConfigError, match=r"quant='int8': .* has no linear layer in its blocks that is wide enough"):
        trio(wide, quant={Role.ENCODER: "int8"})


def test_the_denoiser_of_a_replayed_pipeline_is_quantised_too(tmp_path: Path) -> None:
    tokenizer = t5_tokenizer()
    transformer = cogvideox_transformer(num_attention_heads=8, attention_head_dim=64)
    CogVideoXPipeline(
        tokenizer=tokenizer, text_encoder=t5(tokenizer), vae=cogvideox_vae(), transformer=transformer,
        scheduler=CogVideoXDDIMScheduler(),
    ).save_pretrained(tmp_path)  # fmt: skip
    stock, small = trio(tmp_path), trio(tmp_path, quant={Role.DENOISER: "int8"})
    request = REQUESTS["cogvideox_t2v"] | {"seed": 4}
    (expected,), (got,) = stock.generate(request), small.generate(request)
    difference = abs(got.frames.astype(int) - expected.frames.astype(int))
    assert 0 < difference.mean() < 8  # of 255


@pytest.mark.parametrize(
    ("kind", "settings", "layers", "kept"),
    [
        ("CogVideoXTransformer3DModel", {"num_layers": 2}, 16, ("patch_embed.text_proj", "norm_out.linear")),
        ("SD3Transformer2DModel", {"num_layers": 2, "sample_size": 32}, 25, ("context_embedder", "norm_out.linear")),
        ("MochiTransformer3DModel", {"num_layers": 2}, 25, ("time_embed.caption_proj", "norm_out.linear")),
        ("PixArtTransformer2DModel", {"num_layers": 2}, 20, ("adaln_single.linear",)),
        ("SanaTransformer2DModel", {"num_layers": 2}, 16, ("caption_projection.linear_1",)),
        (
            "UNetSpatioTemporalConditionModel",
            {"block_out_channels": (128, 128, 512, 512), "num_attention_heads": (2, 2, 8, 8), "layers_per_block": 1,
             "cross_attention_dim": 512},
            120,
            ("time_embedding.linear_2", "add_embedding.linear_2"),
        ),
    ],
)  # fmt: skip
def test_models_that_name_no_repeated_blocks_are_quantised_but_for_their_ends(
    kind: str, settings: dict[str, Any], layers: int, kept: tuple[str, ...]
) -> None:
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**settings)
    model = model.to_empty(device="cpu")
    before = weight_bytes(model)
    assert quantise([model], "int8", torch.device("cpu")) == layers
    assert weight_bytes(model) < 0.8 * before
    assert all(model.get_parameter(f"{name}.weight").dtype is torch.float32 for name in kept)


def test_adapters_stay_as_they_are_on_a_quantised_denoiser(wide: Path, tmp_path: Path) -> None:
    """They change what comes of it as much as they do without int8."""
    stock = trio(wide)
    layers = ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2", "blocks.1.attn2.to_v")
    model = stock.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    loras = (adapter(model, layers, tmp_path / "fox.safetensors"),)
    made: list[Any] = []
    for quant in ({}, {Role.DENOISER: "int8"}):
        small = trio(wide, loras=loras, quant=quant)
        made.append([small.generate({**REQUEST, "lora": lora})[0].frames.astype(int) for lora in (None, "fox", None)])
    first = small.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer").get_submodule(layers[0])
    assert type(first.base_layer.weight).__name__ != "Parameter"
    assert all(adapted.weight.dtype is torch.float32 for adapted in first.lora_A.values())
    (plain, fox, _), (small_plain, small_fox, again) = made
    effect, small_effect = abs(fox - plain).mean(), abs(small_fox - small_plain).mean()
    assert effect > 0.5
    assert abs(small_effect - effect) < 0.1 * effect
    assert 0 < abs(small_fox - fox).mean() < 8  # of 255
    assert (again == small_plain).all()


@pytest.mark.parametrize("kind", ["model", "block"])
def test_a_quantised_denoiser_can_be_offloaded(wide: Path, kind: str) -> None:
    quant = {Role.DENOISER: "int8"}
    (expected,) = trio(wide, quant=quant).generate(REQUEST)
    (got,) = trio(wide, quant=quant, offload={Role.DENOISER: kind}).generate(REQUEST)
    assert (got.frames == expected.frames).all()
