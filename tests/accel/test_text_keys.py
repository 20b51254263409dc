"""Keys and values of the text: the stock model's bytes, computed once for each text that is still there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.pipeline.harness import Inbox, finish, post
from triptych.accel.parallel.sequence import TokenSharing
from triptych.accel.shortage import free_memory
from triptych.accel.text_keys import TextKeys, supports
from triptych.config import ModelConfig
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import Resumable

PICTURE_TOKENS = 5


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


def build(*, picture: bool) -> WanTransformer3DModel:
    torch.manual_seed(0)
    extra: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 16} if picture else {}
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, ffn_dim=32, num_layers=2, text_dim=24, freq_dim=16, **extra
    ).eval()


def text(seed: int) -> Tensor:
    return torch.randn(1, 512, 24, generator=torch.Generator().manual_seed(seed))


def forward(model: WanTransformer3DModel, text: Tensor, step: int, image: Tensor | None = None) -> Tensor:
    latents = torch.randn(1, 16, 2, 8, 8, generator=torch.Generator().manual_seed(step))
    return model(latents, torch.tensor([900.0 - step]), text, image, return_dict=False)[0]


def counted(model: WanTransformer3DModel) -> Callable[[], int]:
    """How often the keys of a text were computed."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.blocks[0].attn2.to_k.register_forward_hook(count)
    return lambda: calls


@pytest.mark.parametrize("picture", [False, True])
def test_interleaved_requests_get_the_stock_bytes_and_each_text_is_computed_once(picture: bool) -> None:
    stock, model = build(picture=picture), build(picture=picture)
    keys = TextKeys()
    assert supports(model)
    assert keys.install(model) == 2
    calls = counted(model)
    images = [torch.randn(1, PICTURE_TOKENS, 16) if picture else None for _ in range(3)]
    texts = [text(seed) for seed in range(3)]
    for step in range(3):
        for embeds, image in zip(texts, images, strict=True):
            assert torch.equal(forward(model, embeds, step, image), forward(stock, embeds, step, image))
    assert calls() == 3
    assert len(keys) == 3
    del texts[1:], embeds
    assert len(keys) == 1


def test_a_text_that_was_written_to_is_another_text() -> None:
    stock, model = build(picture=False), build(picture=False)
    keys = TextKeys()
    keys.install(model)
    embeds = text(1)
    forward(model, embeds, 0)
    embeds.mul_(2)
    assert torch.equal(forward(model, embeds, 1), forward(stock, embeds, 1))
    other = text(2)
    embeds.add_(1)
    forward(model, other, 2)
    assert len(keys) == 1  # what was computed of its former values is of no use to anybody


def test_past_the_bound_a_text_is_computed_each_time_and_the_earlier_ones_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stock, model = build(picture=False), build(picture=False)
    one = 512 * 16 * 4 * (1 + 2 * 2)  # its embedding, and two blocks' keys and values
    keys = TextKeys(most=2 * one)
    keys.install(model)
    calls = counted(model)
    texts = [text(seed) for seed in range(3)]
    for step in range(3):
        for embeds in texts:
            assert torch.equal(forward(model, embeds, step), forward(stock, embeds, step))
    assert len(keys) == 2
    assert calls() == 1 + 1 + 3
    assert caplog.text.count("keys and values of 2 texts take as much as they may") == 1
    del texts[0]
    forward(model, embeds, 3)
    assert len(keys) == 2, "there is room again"


def test_when_memory_runs_out_they_are_dropped_and_computed_again() -> None:
    stock, model = build(picture=False), build(picture=False)
    keys = TextKeys()
    keys.install(model)
    calls = counted(model)
    embeds = text(1)
    forward(model, embeds, 0)
    free_memory(torch.OutOfMemoryError())
    assert len(keys) == 0
    assert torch.equal(forward(model, embeds, 1), forward(stock, embeds, 1))
    assert (len(keys), calls()) == (1, 2)


def test_compiled_blocks_take_them_without_a_break() -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    stock, model = build(picture=False), build(picture=False)
    model.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=backend)
    TextKeys().install(model)
    embeds = text(1)
    for step in range(2):
        torch.testing.assert_close(forward(model, embeds, step), forward(stock, embeds, step))
    assert graphs == 1  # for all blocks


def test_blocks_may_share_their_tokens_with_other_ranks() -> None:
    stock, model = build(picture=False), build(picture=False)
    TextKeys().install(model)
    TokenSharing(model)  # whose hooks look the blocks' arguments up by name
    embeds = text(1)
    assert torch.equal(forward(model, embeds, 0), forward(stock, embeds, 0))


def test_a_served_request_computes_each_of_its_texts_once_and_resumes_to_the_same_bytes() -> None:
    stock = load_pipeline(ModelConfig(path="tiny", device="cpu"), (Role.ENCODER, Role.DENOISER), "cpu")
    kept = load_pipeline(ModelConfig(path="tiny", device="cpu", profile="lossless"), (Role.DENOISER,), "cpu")
    assert isinstance(kept, ModularRolePipeline)
    params = {"prompt": "a red ball", "seed": 3, "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}
    inbox: Inbox = {role: [] for role in ROLES}
    post(finish(stock.start(Role.ENCODER, params, [], [])), inbox)
    handed = inbox[Role.DENOISER]
    (expected,) = finish(stock.start(Role.DENOISER, params, handed, [])).outputs
    calls = counted(kept.component(Role.DENOISER, "transformer"))
    first, second = (kept.start(Role.DENOISER, params, handed, []) for _ in range(2))
    for _ in range(2):
        first.advance()
    assert calls() == 2  # with and without the prompt
    assert isinstance(first, Resumable)
    assert isinstance(second, Resumable)
    saved = first.checkpoint()
    assert saved is not None
    second.restore(*saved)
    for run in (first, second):
        (made,) = finish(run).outputs
        assert all(torch.equal(a, b) for a, b in zip(made.tensors, expected.tensors, strict=True))
