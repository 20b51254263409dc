"""Kept prompt embeddings are the bytes that the encoder would make, within their memory, safe from later writes."""

from __future__ import annotations

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from triptych.accel.prompts import PromptCache, install
from triptych.accel.tally import Tally


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


@pytest.fixture
def encoder() -> UMT5EncoderModel:
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    return UMT5EncoderModel(config).eval()


def tokens(*ids: int) -> torch.Tensor:
    return torch.tensor([ids])


def embed(encoder: UMT5EncoderModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return encoder(ids, torch.ones_like(ids) if mask is None else mask).last_hidden_state


def test_a_prompt_seen_before_gives_the_same_bytes_without_computing(encoder: UMT5EncoderModel) -> None:
    stock = embed(encoder, tokens(5, 6, 7))
    cache = PromptCache(max_bytes=1 << 20, tally=Tally())
    install(encoder, cache, "text_encoder")
    first = embed(encoder, tokens(5, 6, 7))
    again = embed(encoder, tokens(5, 6, 7))
    assert torch.equal(first, stock)
    assert torch.equal(again, stock)
    assert (cache.tally.prompt_hits, cache.tally.prompt_misses) == (1, 1)
    other_mask = embed(encoder, tokens(5, 6, 7), torch.tensor([[1, 1, 0]]))
    assert not torch.equal(other_mask, stock)
    assert cache.tally.prompt_misses == 2


def test_what_a_caller_writes_to_does_not_reach_the_next(encoder: UMT5EncoderModel) -> None:
    install(encoder, PromptCache(max_bytes=1 << 20, tally=Tally()), "text_encoder")
    stock = embed(encoder, tokens(5, 6)).clone()
    for _ in range(2):
        answer = embed(encoder, tokens(5, 6))
        assert torch.equal(answer, stock)
        answer.zero_()


def test_the_least_recently_used_goes_when_memory_is_full(encoder: UMT5EncoderModel) -> None:
    each = 3 * 16 * 4
    cache = PromptCache(max_bytes=2 * each, tally=Tally())
    install(encoder, cache, "text_encoder")
    for ids in ((1, 2, 3), (4, 5, 6), (1, 2, 3), (7, 8, 9), (1, 2, 3)):
        embed(encoder, tokens(*ids))
    assert cache.used_bytes == 2 * each
    assert cache.tally.prompt_hits == 2
    embed(encoder, tokens(4, 5, 6))
    assert cache.tally.prompt_hits == 2  # it had to go
    embed(encoder, torch.ones(1, 9, dtype=torch.long))  # larger than all room: computed, not kept
    assert cache.used_bytes <= 2 * each


def test_two_encoders_never_answer_for_each_other(encoder: UMT5EncoderModel) -> None:
    torch.manual_seed(1)
    other = UMT5EncoderModel(encoder.config).eval()
    expected = embed(other, tokens(1, 2))
    cache = PromptCache(max_bytes=1 << 20, tally=Tally())
    install(encoder, cache, "text_encoder")
    install(other, cache, "text_encoder_2")
    embed(encoder, tokens(1, 2))
    assert torch.equal(embed(other, tokens(1, 2)), expected)
