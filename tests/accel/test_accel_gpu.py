"""What only a GPU shows: compiled and fused models stay close to stock, and warm-up leaves nothing to compile."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, QwenImageTransformer2DModel, WanTransformer3DModel
from torch import Tensor

from triptych.accel import attention
from triptych.accel.plan import accelerate
from triptych.accel.sizes import rehearsing
from triptych.accel.step_cache import StepMemory
from triptych.accel.tally import Tally
from triptych.config import ModelConfig, Shape
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline

from .impatient import impatient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16
REQUEST: dict[str, Any] = {
    "prompt": "a red circle moving right on a blue background",
    "width": 64,
    "height": 64,
    "num_frames": 9,
    "num_inference_steps": 4,
    "seed": 3,
}


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def wan() -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=128, ffn_dim=1024, num_layers=4, text_dim=64, freq_dim=64
    )
    return model.to(CUDA, BF16).eval()


def wan_forward(model: WanTransformer3DModel, frames: int = 3, time: float = 500.0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(1)
    latents = torch.randn(1, 16, frames, 32, 32, generator=generator, device=CUDA, dtype=BF16)
    text = torch.randn(1, 512, 64, generator=generator, device=CUDA, dtype=BF16)
    return model(latents, torch.tensor([time], device=CUDA), text, return_dict=False)[0]


def qwen_forward(model: QwenImageTransformer2DModel, length: int) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(1)
    return model(
        hidden_states=torch.randn(1, 256, 64, generator=generator, device=CUDA, dtype=BF16),
        encoder_hidden_states=torch.randn(1, length, 64, generator=generator, device=CUDA, dtype=BF16),
        encoder_hidden_states_mask=torch.ones(1, length, device=CUDA, dtype=torch.long),
        timestep=torch.tensor([0.5], device=CUDA, dtype=BF16),
        img_shapes=[[(1, 16, 16)]],
        return_dict=False,
    )[0]


@pytest.mark.parametrize("backend", ["flash3", "cudnn", "flash2", "flash3-fp8", "sage"])
def test_every_backend_that_is_here_computes_attention(backend: str) -> None:
    if backend not in attention.present(CUDA):
        pytest.skip(f"{backend} is not on this machine")
    model = wan()
    stock = wan_forward(model)
    attention.use_backend(model, backend)
    assert relative(wan_forward(model), stock) < (1e-1 if backend in attention.LOSSY else 2e-2)


def test_the_chosen_backend_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    first = attention.choose(CUDA, heads=8, head_dim=128, tokens=1024, kept=file)
    again = attention.choose(CUDA, heads=8, head_dim=128, tokens=1024, kept=file)
    assert first.seconds
    assert again == first


def test_the_lossless_wan_transformer_stays_close_to_stock() -> None:
    stock = wan_forward(wan())
    model = wan()
    techniques = accelerate({"transformer": model}, device=CUDA, dtype=BF16, profile="lossless")
    assert all(t.on for t in techniques), techniques
    assert relative(wan_forward(model), stock) < 3e-2
    assert relative(wan_forward(model, frames=5), wan_forward(wan(), frames=5)) < 3e-2


def test_the_fast_wan_transformer_joins_activation_and_quantisation() -> None:
    pytest.importorskip("torchao")
    stock = wan_forward(wan())
    model = wan()
    techniques = accelerate({"transformer": model}, device=CUDA, dtype=BF16, profile="fast")
    assert all(t.on for t in techniques), techniques
    block: Any = model.blocks[0]
    assert {type(layer).__name__ for layer in (block.ffn.net[-1], block.attn1.to_out[0])} == {"RowsProduct"}
    assert relative(wan_forward(model), stock) < 1e-1


def test_the_lossless_qwen_transformer_compiles_two_lengths_for_all() -> None:
    def build() -> QwenImageTransformer2DModel:
        torch.manual_seed(0)
        made = QwenImageTransformer2DModel(
            num_layers=2, num_attention_heads=4, attention_head_dim=128, joint_attention_dim=64
        )
        return made.to(CUDA, BF16).eval()

    from triptych.accel.compiling import count_compilations

    stock, model, tally = build(), build(), Tally()
    count_compilations(tally)
    accelerate({"transformer": model}, device=CUDA, dtype=BF16, profile="lossless")
    for length in (20, 33):
        assert relative(qwen_forward(model, length), qwen_forward(stock, length)) < 3e-2
    known = tally.compilations
    assert known > 0
    assert relative(qwen_forward(model, 47), qwen_forward(stock, 47)) < 3e-2
    assert tally.compilations == known


def test_small_forwards_are_recorded_and_replayed_with_the_same_bytes() -> None:
    model = wan()
    plain = {time: wan_forward(model, time=time) for time in (500.0, 400.0)}
    graphs = impatient(model)
    for _ in range(2):
        for time, expected in plain.items():
            assert torch.equal(wan_forward(model, time=time), expected)
    assert graphs.recordings == 1


def test_compiled_and_fused_blocks_can_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    fused, stock = wan(), wan()
    accelerate({"transformer": fused}, device=CUDA, dtype=BF16, profile="lossless")
    expected = {time: wan_forward(stock, time=time) for time in (500.0, 400.0)}
    with caplog.at_level(logging.INFO, "triptych.accel.cuda_graphs"), rehearsing():
        for time in (500.0, 400.0) * 4:
            assert relative(wan_forward(fused, time=time), expected[time]) < 3e-2
    assert [line for line in caplog.messages if line.startswith(("CUDA graph kept", "CUDA graph dropped"))], (
        caplog.messages
    )


def test_step_caching_goes_with_compiled_blocks() -> None:
    model, memory, tally = wan(), StepMemory(), Tally()
    accelerate(
        {"transformer": model}, device=CUDA, dtype=BF16, profile="lossless", step_cache=0.3, memory=memory, tally=tally
    )
    state: Any = type("State", (), {"triptych_step_cache": {}})()
    outputs: list[Tensor] = []
    for time in (500.0, 499.0):
        memory.enter(state)
        outputs.append(wan_forward(model, time=time))
    assert tally.steps_skipped == 1
    assert relative(outputs[1], outputs[0]) < 0.3


@pytest.mark.parametrize("declared", [True, False])
def test_the_fast_decoder_is_as_exact_as_stock_bfloat16(declared: bool) -> None:
    def build() -> AutoencoderKLWan:
        torch.manual_seed(0)
        return AutoencoderKLWan(base_dim=96, z_dim=16, num_res_blocks=1).to(CUDA).eval()

    latents = torch.randn(1, 16, 6, 16, 16, device=CUDA)
    exact = build().decode(latents).sample
    stock = build().to(BF16).decode(latents.to(BF16)).sample
    fast = build().to(BF16)
    (technique,) = accelerate({"vae": fast}, device=CUDA, dtype=BF16, profile="lossless")
    assert technique.on
    with rehearsing() if declared else nullcontext():
        made = fast.decode(latents.to(BF16)).sample
    assert relative(made, exact) < 1.5 * relative(stock, exact)


def request(role: Role, pipelines: dict[Role, Any]) -> list[Tensor]:
    """The tensors that a request hands from ``role`` to the next one."""
    inbox: dict[Role, list[Any]] = {r: [] for r in ROLES}
    handed: list[Tensor] = []
    for current in ROLES:
        run = pipelines[current].start(current, REQUEST, inbox[current], ())
        while (result := run.advance()) is None:
            pass
        for output in result.outputs:
            inbox[output.consumer].append((output.tree, output.tensors))
            handed += output.tensors if current is role else []
    return handed


def test_after_warm_up_a_request_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    tallies = {role: Tally() for role in ROLES}
    pipelines: dict[Role, Any] = {}
    for role in ROLES:
        config = ModelConfig(
            path="tiny",
            profile="lossless",
            warmup=(Shape(width=64, height=64, frames=9),),
            cache_dir=tmp_path / "cache",
        )
        pipelines[role] = load_pipeline(config, (role,), "cuda:0", tallies[role])
    compiled = {role: tally.compilations for role, tally in tallies.items()}
    assert compiled[Role.DENOISER] > 0
    request(Role.DENOISER, pipelines)
    assert {role: tally.compilations for role, tally in tallies.items()} == compiled


def test_kept_prompts_are_the_same_bytes() -> None:
    pipeline = load_pipeline(ModelConfig(path="tiny"), ROLES, "cuda:0", tally := Tally())
    pipelines = dict.fromkeys(ROLES, pipeline)
    first, again = request(Role.ENCODER, pipelines), request(Role.ENCODER, pipelines)
    assert tally.prompt_hits > 0
    assert len(first) == len(again) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(tensor.is_cuda for tensor in first if tensor.is_floating_point())
