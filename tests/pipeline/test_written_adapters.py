"""LoRA adapters where models are made faster: written into the weights, and nothing is left of them behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.pipeline.adapters import adapter
from triptych.accel.adapters import WrittenAdapters, write_into
from triptych.accel.text_keys import TextKeys
from triptych.config import Lora, ModelConfig
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline

from .classic_harness import REQUESTS, TOLERATED
from .harness import Trio, latents
from .test_lora import REQUEST, interleaved, layer_of, tensors
from .wan_checkpoints import wan22_distilled

pytestmark = TOLERATED

LAYERS = ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2", "blocks.1.attn2.to_v", "blocks.0.attn2.to_k")
CHOICES = (None, "fox", "snow", "fox:0.25,snow:-1.5", None)

Checkpoint = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


def trio(folder: Path, loras: tuple[Lora, ...], **settings: Any) -> Trio:
    config = ModelConfig(path=str(folder), device="cpu", loras=loras, **settings)
    return Trio.of({role: load_pipeline(config, (role,), "cpu") for role in ROLES})  # type: ignore[misc]


@pytest.fixture(scope="module")
def loras(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Lora, ...]:
    folder = tmp_path_factory.mktemp("loras")
    plain = trio(checkpoint("wan_t2v"), ())
    model = plain.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    return (
        adapter(model, LAYERS, folder / "fox.safetensors"),
        adapter(model, LAYERS[1:], folder / "snow.safetensors", seed=2),
    )


@pytest.fixture(scope="module")
def written(checkpoint: Checkpoint, loras: tuple[Lora, ...]) -> Trio:
    return trio(checkpoint("wan_t2v"), loras, profile="lossless")


def denoised(made: Trio, lora: str | None) -> torch.Tensor:
    request = {**REQUEST, "lora": lora} if made.pipelines[Role.DENOISER].schema.param("lora") else REQUEST
    inbox = made.encoded(request)
    made.stage(Role.DENOISER, request, inbox)
    return latents(inbox)


def small_wan() -> Any:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=128, ffn_dim=512, num_layers=1, text_dim=32, in_channels=4,
        out_channels=4, freq_dim=64, cross_attn_norm=True, rope_max_seq_len=32,
    ).eval()  # fmt: skip


def adapted(model: Any, layer: str) -> WrittenAdapters:
    from peft import LoraConfig

    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=[layer], init_lora_weights=False), adapter_name="fox")
    return write_into(model)


def test_each_choice_is_what_layers_beside_the_weights_make_up_to_rounding(
    checkpoint: Checkpoint, loras: tuple[Lora, ...], written: Trio
) -> None:
    stock, bare = trio(checkpoint("wan_t2v"), loras), trio(checkpoint("wan_t2v"), (), profile="lossless")
    seen: list[torch.Tensor] = []
    for choice in CHOICES[:-1]:
        made = denoised(written, choice)
        torch.testing.assert_close(made, denoised(stock, choice), rtol=1e-3, atol=1e-4)
        assert not any(torch.allclose(made, other, atol=1e-2) for other in seen), f"{choice} changed nothing"
        seen.append(made)
    assert torch.equal(denoised(written, None), denoised(bare, None)), "nothing of the adapters is left"


def test_requests_that_name_none_have_the_default_one(checkpoint: Checkpoint, loras: tuple[Lora, ...]) -> None:
    distilled = trio(checkpoint("wan_t2v"), loras, profile="lossless", defaults={"lora": "fox:0.5"})
    made, wanted = distilled.generate(REQUEST)[0], distilled.generate({**REQUEST, "lora": "fox:0.5"})[0]
    assert np.array_equal(made.frames, wanted.frames)
    assert not np.array_equal(made.frames, distilled.generate({**REQUEST, "lora": "fox"})[0].frames)
    with pytest.raises(ConfigError, match="--default lora='bear': 'bear' is none of the adapters served here"):
        trio(checkpoint("wan_t2v"), loras, defaults={"lora": "bear"})


def test_interleaved_requests_keep_their_own(written: Trio) -> None:
    """Also where they begin from the same tensors."""
    requests = [{**REQUEST, "lora": choice} for choice in CHOICES]
    alone = [written.generate(request)[0].frames for request in requests]
    for choice, frames, lone in zip(CHOICES, interleaved(written, requests), alone, strict=True):
        assert np.array_equal(frames, lone), choice
    inbox = written.encoded(requests[0])
    runs = [written.start(Role.DENOISER, request, inbox) for request in requests]
    for _ in range(REQUEST["num_inference_steps"]):
        results = [run.advance() for run in runs]
    for choice, result in zip(CHOICES, results, strict=True):
        assert result is not None
        made = next(tensor for output in result.outputs for tensor in output.tensors if tensor.ndim == 5)
        assert torch.equal(made, denoised(written, choice)), choice


def test_what_is_kept_of_texts_goes_with_the_weights_that_it_was_computed_with() -> None:
    """One text's tensor may come with several requests, as those of kept prompts do."""
    plain, kept = small_wan(), small_wan()
    adapters = [adapted(model, "attn2.to_v") for model in (plain, kept)]
    TextKeys().install(kept)
    random = torch.Generator().manual_seed(2)
    given = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8, generator=random),
        "timestep": torch.tensor([3.0]),
        "encoder_hidden_states": torch.randn(1, 7, 32, generator=random),
    }
    seen: list[torch.Tensor] = []
    for choice in ((), (("fox", 1.0),), (("fox", 0.5),), ()):
        for of in adapters:
            of.choose(choice)
        wanted, got = plain(**given).sample, kept(**given).sample
        assert torch.equal(kept(**given).sample, got)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        seen.append(got)
    assert torch.equal(seen[0], seen[3])
    assert not torch.allclose(seen[1], seen[2], atol=1e-3)


def test_running_out_of_memory_half_way_leaves_no_mixture(
    checkpoint: Checkpoint, loras: tuple[Lora, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trio(checkpoint("wan_t2v"), loras, profile="lossless")
    before = denoised(made, None)
    real, calls = torch.addmm, [0]

    def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", scarce)
    with pytest.raises(Exception, match="no memory"):
        denoised(made, "fox")
    monkeypatch.undo()
    assert torch.equal(denoised(made, None), before)


def test_a_bias_in_the_file_is_added_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As files of distilled Wan have them."""
    name, layer = "diffusion_model.blocks.0.self_attn.q", {"diffusion_model.blocks.0.self_attn.q": (48, 48)}
    made = tensors(3, layer, "")
    save_file(made, tmp_path / "bare.safetensors")
    save_file(made | {f"{name}.diff_b": torch.ones(48)}, tmp_path / "fox.safetensors")
    found: list[torch.Tensor] = []
    for file in ("bare", "fox"):
        lora = (Lora(name="fox", path=str(tmp_path / f"{file}.safetensors")),)
        stock, fast = (trio(checkpoint("wan_t2v"), lora, profile=profile) for profile in ("stock", "lossless"))
        for scale in ("fox", "fox:0.5", None):
            found.append(denoised(fast, scale))
            torch.testing.assert_close(found[-1], denoised(stock, scale), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found[0], found[3], atol=1e-3)
    assert torch.equal(found[2], found[5])


def test_an_adapter_that_is_more_than_a_product_is_refused_by_its_layer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    layer = {"blocks.0.attn1.to_q": (48, 48)}
    made = tensors(3, layer) | {"transformer.blocks.0.attn1.to_q.lora_magnitude_vector": torch.ones(48)}
    save_file(made, tmp_path / "fox.safetensors")
    loras = (Lora(name="fox", path=str(tmp_path / "fox.safetensors")),)
    with pytest.raises(ConfigError, match=r"lora: blocks\.0\.attn1\.to_q: .*Dora.*; profile stock can do that"):
        trio(checkpoint("wan_t2v"), loras, profile="lossless")


def test_replayed_pipelines_and_convolutions_too(classic_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = classic_checkpoint("stable_diffusion")
    plain = trio(folder, ())
    unet = plain.pipelines[Role.DENOISER].component(Role.DENOISER, "unet")
    name, convolution = next((n, m) for n, m in unet.named_modules() if n.endswith("resnets.0.conv1"))
    random = torch.Generator().manual_seed(7)
    wide, narrow, *kernel = convolution.weight.shape
    file = tmp_path / "fox.safetensors"
    save_file(
        tensors(5, layer_of(unet, "attn1.to_q"), "unet.")
        | {
            f"unet.{name}.lora_A.weight": torch.randn(4, narrow, *kernel, generator=random),
            f"unet.{name}.lora_B.weight": torch.randn(wide, 4, 1, 1, generator=random),
        },
        file,
    )
    loras = (Lora(name="fox", path=str(file), scale=0.1),)
    stock, fast = trio(folder, loras), trio(folder, loras, profile="lossless")
    request = {**REQUESTS["stable_diffusion"], "seed": 4}
    frames = [[made.generate({**request, "lora": lora})[0].frames for lora in (None, "fox")] for made in (stock, fast)]
    assert np.array_equal(frames[0][0], frames[1][0])
    assert abs(frames[0][1].astype(int) - frames[1][1].astype(int)).max() <= 1
    assert not np.array_equal(frames[0][0], frames[0][1])


def test_both_transformers_of_a_model_have_theirs(tmp_path: Path) -> None:
    wan22_distilled(tmp_path / "model")
    save_file(tensors(6), tmp_path / "high.safetensors")
    save_file(tensors(7, {"blocks.0.attn1.to_v": (48, 48)}), tmp_path / "low.safetensors")
    lora = Lora(name="fox", path=f"{tmp_path}/high.safetensors", second=f"{tmp_path}/low.safetensors", scale=0.5)
    stock, fast = (trio(tmp_path / "model", (lora,), profile=profile) for profile in ("stock", "lossless"))
    torch.testing.assert_close(denoised(fast, "fox"), denoised(stock, "fox"), rtol=1e-3, atol=1e-4)


def test_text_encoders_too_without_keeping_their_answers(classic_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = classic_checkpoint("stable_diffusion")
    plain = trio(folder, ())
    text = plain.pipelines[Role.ENCODER].component(Role.ENCODER, "text_encoder")
    unet = plain.pipelines[Role.DENOISER].component(Role.DENOISER, "unet")
    made = tensors(6, layer_of(text, "q_proj"), "text_encoder.") | tensors(5, layer_of(unet, "attn1.to_q"), "unet.")
    save_file(made, tmp_path / "fox.safetensors")
    loras = (Lora(name="fox", path=str(tmp_path / "fox.safetensors")),)
    stock, fast = trio(folder, loras), trio(folder, loras, profile="lossless")
    request = {**REQUESTS["stable_diffusion"], "seed": 4}
    for lora in (None, "fox", None):
        (wanted,), (got,) = (made.generate({**request, "lora": lora}) for made in (stock, fast))
        assert abs(wanted.frames.astype(int) - got.frames.astype(int)).max() <= 1, lora


def test_work_of_one_way_is_not_resumed_in_the_other(checkpoint: Checkpoint, loras: tuple[Lora, ...]) -> None:
    prints = {
        profile: load_pipeline(
            ModelConfig(path=str(checkpoint("wan_t2v")), device="cpu", loras=loras, profile=profile),
            (Role.DENOISER,),
            "cpu",
        ).fingerprint
        for profile in ("stock", "lossless")
    }
    assert prints["stock"] != prints["lossless"]


@pytest.mark.quant
def test_quantised_layers_are_quantised_anew(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from triptych.accel.quant import quantise

    model = small_wan()
    plain = model.blocks[0].attn1.to_q.weight.detach().clone()
    adapters = adapted(model, "attn1.to_q")
    delta = adapters._layers[0].parts["fox"]  # pyright: ignore[reportPrivateUsage]
    wanted = plain + 0.5 * (delta.up @ delta.down)
    assert quantise([model], "int8", torch.device("cpu")) > 0
    live = model.blocks[0].attn1.to_q.weight
    assert type(live).__name__ != "Parameter"
    before = live.dequantize().clone()
    adapters.choose((("fox", 0.5),))
    step = abs(wanted).amax(dim=1, keepdim=True) / 127
    assert (abs(model.blocks[0].attn1.to_q.weight.dequantize() - wanted) <= 0.51 * step).all()
    assert model.blocks[0].attn1.to_q.weight is live, "kernels hold the memory that it has"
    adapters.choose(())
    assert torch.equal(model.blocks[0].attn1.to_q.weight.dequantize(), before)
