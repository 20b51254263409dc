"""What is asked for by name takes effect or is refused; what is left to the machine says what it chose and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    PRXTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor, nn

from triptych.accel import attention, plan, quant
from triptych.accel.batching import ForwardBatcher
from triptych.accel.plan import Technique, accelerate
from triptych.accel.sizes import rehearsing
from triptych.accel.wan_vae import WanVaeDecoder, install, installed, supports
from triptych.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


@pytest.fixture
def transformer() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=8, attention_head_dim=64, ffn_dim=1024, num_layers=2, text_dim=32, freq_dim=32
    ).eval()


def forward(model: WanTransformer3DModel) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 16, 2, 8, 8, generator=generator)
    text = torch.randn(1, 7, 32, generator=generator)
    return model(latents, torch.tensor([500.0]), text, return_dict=False)[0]


def test_stock_changes_nothing(transformer: WanTransformer3DModel) -> None:
    before = forward(transformer)
    techniques = accelerate({"transformer": transformer}, device=CPU, dtype=torch.float32, profile="stock")
    assert torch.equal(forward(transformer), before)
    assert [t.on for t in techniques] == [False]


def test_lossless_without_a_gpu_says_why_it_leaves_the_stock_path(transformer: WanTransformer3DModel) -> None:
    techniques = accelerate({"transformer": transformer}, device=CPU, dtype=torch.float32, profile="lossless")
    assert not any(t.on and not t.exact for t in techniques)
    assert any("CUDA" in t.why for t in techniques)


def test_a_model_that_acceleration_passes_over_is_named_and_takes_no_backend_by_name() -> None:
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    named = {"transformer": model}
    told = {t.name: t for t in accelerate(named, device=CPU, dtype=torch.float32, profile="lossless")}
    assert not any(technique.on for technique in told.values())
    assert told["transformer: compile"].why == "needs CUDA and Triton"
    assert "its own, which is not dispatched" in told["transformer: attention"].why
    with pytest.raises(ConfigError, match="attention-backend='native': SD3Transformer2DModel has no dispatched"):
        accelerate(named, device=CPU, dtype=torch.float32, profile="stock", backend="native")


def test_a_model_without_blocks_is_named() -> None:
    named: dict[str, nn.Module] = {"transformer": nn.Sequential(nn.Linear(2, 2))}
    told = {t.name: t for t in accelerate(named, device=CPU, dtype=torch.float32, profile="lossless")}
    assert told["transformer: kernels and compile"].why == "Sequential has no blocks, so it runs as it is"


def test_attention_is_chosen_for_a_model_that_names_no_repeated_blocks() -> None:
    """PRX's attention goes through Diffusers' dispatcher, which is all that a backend needs."""
    torch.manual_seed(0)
    model = PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=1,
        axes_dim=[8, 8],
    )  # fmt: skip
    assert not quant.repeated_blocks(model)
    named = {"transformer": model}
    told = {t.name: t for t in accelerate(named, device=CPU, dtype=torch.float32, profile="lossless", backend="native")}
    assert told["transformer: attention"].on
    assert not told["transformer: compile"].on
    assert attention.backends(named) == {"transformer": "native"}


def test_auto_chooses_for_every_model_of_known_heads_whose_attention_is_dispatched(
    transformer: WanTransformer3DModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(transformer), "_repeated_blocks", None)
    named = {"transformer": transformer}
    told = {t.name: t for t in accelerate(named, device=CPU, dtype=torch.bfloat16, profile="lossless")}
    assert told["transformer: attention"].why == "native, the only one present"


def test_flash_attention_leaves_masks_to_the_native_one() -> None:
    shape = (1, 6, 2, 8)
    query, key, value = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    attention._register("flash2")  # pyright: ignore[reportPrivateUsage]

    def attended(entry: str) -> Tensor:
        return dispatch_attention_fn(query, key, value, attn_mask=mask, backend=AttentionBackendName(entry))

    assert torch.equal(attended("_native_flash"), attended("native"))


def test_a_recording_lies_around_what_keeps_the_keys_of_a_text(
    transformer: WanTransformer3DModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would read the keys of the text that it was recorded with, whatever text a request brings."""
    made: list[Tensor] = []
    transformer.blocks[0].attn2.to_k.register_forward_hook(lambda _module, _inputs, output: made.append(output))

    def record(name: str, model: Any, _setting: object) -> Technique:
        compute = model.forward

        def replay(*args: Any, **kwargs: Any) -> Any:
            made.clear()
            result = compute(*(arg.clone() for arg in args), **kwargs)
            assert made, "the recording has no keys of its own"
            return result

        model.forward = replay
        return Technique(name=name, on=True, why="a stand-in", exact=True)

    monkeypatch.setattr(plan, "_graphs", record)
    accelerate({"transformer": transformer}, device=CPU, dtype=torch.float32, profile="lossless")
    latents, text = torch.randn(1, 16, 2, 8, 8), torch.randn(1, 7, 32)
    for _ in range(2):
        transformer(latents, torch.tensor([500.0]), text, return_dict=False)


@pytest.mark.parametrize(("kind", "own"), [("wan", True), ("qwen", False)])
def test_sizes_have_graphs_of_their_own_unless_every_text_would_need_more(
    transformer: WanTransformer3DModel, monkeypatch: pytest.MonkeyPatch, kind: str, own: bool
) -> None:
    model: Any = transformer
    if kind == "qwen":
        model = QwenImageTransformer2DModel(
            num_layers=1, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
        )
    met: list[bool] = []

    def noting(_name: str, model: Any, setting: Any, **_: object) -> list[Technique]:
        model.forward = lambda _: met.append(setting.sizes.rehearsed)
        return []

    monkeypatch.setattr(plan, "_kernels", noting)
    accelerate({"transformer": model}, device=CPU, dtype=torch.float32, profile="lossless")
    with rehearsing():
        model(torch.ones(1))
    for size in (2, 1):
        model(torch.ones(size))
    assert met == [own, False, own]


ORDER = ("compile", "text keys", "step cache", "graphs", "masks", "batching")


@pytest.mark.parametrize("step_cache", [0.0, 0.1])
@pytest.mark.parametrize("batcher", [None, ForwardBatcher()])
@pytest.mark.parametrize("kind", ["wan", "qwen"])
def test_what_lies_around_a_forward_lies_in_one_order_whatever_the_model(
    transformer: WanTransformer3DModel,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    batcher: ForwardBatcher | None,
    step_cache: float,
) -> None:
    model: Any = transformer
    if kind == "qwen":
        model = QwenImageTransformer2DModel(
            num_layers=2, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
        )
    put: list[str] = []

    def noting(word: str) -> Any:
        return lambda *_, **__: put.append(word) or Technique(name=word, on=True, why="")

    for function, word in (("_text_keys", 1), ("_step_cache", 2), ("_graphs", 3), ("_batching", 5)):
        monkeypatch.setattr(plan, function, noting(ORDER[word]))
    monkeypatch.setattr(plan, "_fuse_and_compile", lambda *args, **kwargs: [noting("compile")(*args, **kwargs)])
    monkeypatch.setattr(plan, "_fusible", lambda *_: True)
    monkeypatch.setattr(plan.qwen_dit, "leave_out_masks", noting("masks"))
    accelerate(
        {"transformer": model},
        device=CPU,
        dtype=torch.float32,
        profile="lossless",
        batcher=batcher,
        step_cache=step_cache,
    )
    there = {
        "compile",
        "text keys" if kind == "wan" else "masks",
        "step cache" if step_cache else "graphs",
        *(("batching",) if batcher is not None else ()),
    }
    assert put == [word for word in ORDER if word in there]


def test_a_backend_that_is_not_there_is_refused_with_those_that_are(transformer: WanTransformer3DModel) -> None:
    with pytest.raises(ConfigError, match=r"attention-backend='flash3'.*present: native"):
        accelerate({"transformer": transformer}, device=CPU, dtype=torch.float32, profile="stock", backend="flash3")


@pytest.mark.parametrize(("wish", "missing"), [("native,auto", []), ("auto", []), ("flash3,native", ["flash3"])])
def test_a_wish_that_is_not_met_is_told_and_one_that_is_met_is_not(
    transformer: WanTransformer3DModel, caplog: pytest.LogCaptureFixture, wish: str, missing: list[str]
) -> None:
    accelerate({"transformer": transformer}, device=CPU, dtype=torch.float32, profile="stock", backend=wish)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [f"attention-backend {name} is not on this machine: transformer uses native" for name in missing]


def test_a_named_backend_reaches_every_attention(transformer: WanTransformer3DModel) -> None:
    assert attention.use_backend(transformer, "native") == 4  # two blocks, self and cross
    names = {str(m.processor._attention_backend) for m in transformer.modules() if hasattr(m, "processor")}
    assert names == {"native"} or names == {"AttentionBackendName.NATIVE"}


def test_a_model_without_dispatched_attention_refuses_a_backend() -> None:
    with pytest.raises(ConfigError, match="no dispatched attention"):
        attention.use_backend(torch.nn.Linear(2, 2), "native")


def test_fp8_without_the_hardware_is_refused(transformer: WanTransformer3DModel) -> None:
    with pytest.raises(ConfigError, match="fp8"):
        quant.quantise([transformer], "fp8", CPU)


@pytest.fixture
def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    # 48 channels at full resolution are no multiple of 32, as Wan's 96 are none of 64
    return AutoencoderKLWan(
        base_dim=48, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()


@pytest.mark.parametrize(("frames", "chunk", "align"), [(1, 4, 1), (2, 4, 1), (4, 1, 1), (6, 2, 32), (6, 4, 32)])
def test_fast_decode_equals_the_stock_one_up_to_rounding(
    vae: AutoencoderKLWan, frames: int, chunk: int, align: int
) -> None:
    latents = torch.randn(1, 4, frames, 4, 6, generator=torch.Generator().manual_seed(2))
    stock = vae.decode(latents, return_dict=False)[0]
    fast = WanVaeDecoder(vae, chunk=chunk, align=align).decode(latents)
    assert fast.shape == stock.shape == (1, 3, 4 * frames - 3, 32, 48)
    assert (fast - stock).abs().max() < 2e-5


def test_frames_come_out_as_they_are_done(vae: AutoencoderKLWan) -> None:
    latents = torch.randn(1, 4, 6, 4, 4, generator=torch.Generator().manual_seed(2))
    decoder = WanVaeDecoder(vae, chunk=2)
    assert [part.shape[2] for part in decoder.chunks(latents)] == [1, 8, 8, 4]


def test_an_installed_decoder_is_what_decode_uses_for_every_item(vae: AutoencoderKLWan) -> None:
    assert supports(vae)
    latents = torch.randn(2, 4, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    stock = vae.decode(latents).sample
    calls: list[int] = []

    class Counting(WanVaeDecoder):
        def decode(self, latents: Tensor) -> Tensor:
            calls.append(latents.shape[0])
            return super().decode(latents)

    install(vae, Counting(vae))
    assert (vae.decode(latents).sample - stock).abs().max() < 2e-5
    assert calls == [1, 1]


@pytest.mark.parametrize(("sliced", "tiled"), [(True, False), (False, True), (True, True)])
def test_the_fast_decoder_goes_with_slicing_and_not_with_tiling(
    vae: AutoencoderKLWan, monkeypatch: pytest.MonkeyPatch, sliced: bool, tiled: bool
) -> None:
    monkeypatch.setattr(attention, "present", lambda _: ("native",))
    vae.use_slicing, vae.use_tiling = sliced, tiled
    told = accelerate({"vae": vae}, device=torch.device("cuda"), dtype=torch.bfloat16, profile="lossless")
    (decode,) = (technique for technique in told if technique.name == "vae: fast decode")
    assert decode.on == (not tiled)
    assert (installed(vae) is not None) == (not tiled)


def test_slices_are_decoded_by_the_installed_decoder(vae: AutoencoderKLWan) -> None:
    latents = torch.randn(2, 4, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    install(vae, WanVaeDecoder(vae))
    whole = vae.decode(latents).sample
    vae.use_slicing = True
    assert torch.equal(vae.decode(latents).sample, whole)


def test_joining_says_what_is_joined_and_is_refused_where_nothing_can_be(transformer: WanTransformer3DModel) -> None:
    def told(model: Any) -> str:
        (technique,) = (
            technique
            for technique in accelerate(
                {"transformer": model}, device=CPU, dtype=torch.float32, profile="stock", batcher=ForwardBatcher()
            )
            if technique.name == "transformer: batching"
        )
        assert technique.on
        return technique.why

    qwen = QwenImageTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
    )
    assert told(transformer) == "forwards of up to 8 requests of equal shapes, where that is faster"
    assert "whatever their texts" in told(qwen)
    packing: Any = type("Cosmos3OmniTransformer", (QwenImageTransformer2DModel,), {})(
        num_layers=1, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
    )
    with pytest.raises(ConfigError, match="batching: Cosmos3OmniTransformer computes each request by itself"):
        told(packing)
