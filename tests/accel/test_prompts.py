"""Kept prompt embeddings are the bytes that the encoder would make, within their memory, safe from later writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, UMT5Config, UMT5EncoderModel

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


LAYERS, WIDTH, WORDS = 3, 16, 4
HIDDEN = WORDS * WIDTH * 4
"""Bytes of one layer's hidden states."""


@pytest.fixture
def language_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def asked(model: Any, *, ids: tuple[int, ...] = (1, 2, 3, 4)) -> Any:
    return model(input_ids=tokens(*ids), attention_mask=torch.ones(1, WORDS).long(), output_hidden_states=True)


@pytest.mark.parametrize("read", [
    lambda answer: answer.hidden_states[-2],
    lambda answer: answer["hidden_states"][1:3][0],
    lambda answer: answer[0],
    lambda answer: torch.stack(answer.hidden_states, dim=-1),
    lambda answer: torch.cat(list(answer.hidden_states)),
    lambda answer: torch.stack([answer.hidden_states[place] for place in (0, 2)], dim=1),
    lambda answer: torch.stack(answer[2]),
])  # fmt: skip
def test_a_language_model_computes_a_prompt_once_however_it_is_read(
    language_model: Qwen3ForCausalLM, read: Callable[[Any], torch.Tensor]
) -> None:
    """Its answer holds a key-value cache, which is nothing to keep."""
    expected = read(asked(language_model))
    cache = PromptCache(max_bytes=1 << 20, tally=Tally())
    install(language_model, cache, "text_encoder")
    for _ in range(3):
        got = read(asked(language_model))
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected)
    assert (cache.tally.prompt_hits, cache.tally.prompt_misses) == (2, 1)


def test_only_what_is_read_takes_memory(language_model: Qwen3ForCausalLM) -> None:
    cache = PromptCache(max_bytes=2 * HIDDEN, tally=Tally())
    install(language_model, cache, "text_encoder")
    for _ in range(2):
        for ids in ((1, 2, 3, 4), (5, 6, 7, 8)):
            assert asked(language_model, ids=ids).hidden_states[-2].shape == (1, WORDS, WIDTH)
    assert cache.used_bytes == 2 * HIDDEN
    assert cache.tally.prompt_misses == 2


def test_a_reader_of_more_gets_it_computed_and_kept(language_model: Qwen3ForCausalLM) -> None:
    stock = asked(language_model)
    cache = PromptCache(max_bytes=1 << 20, tally=Tally())
    install(language_model, cache, "text_encoder")
    assert torch.equal(asked(language_model).hidden_states[1], stock.hidden_states[1])
    for misses in (2, 2):
        assert torch.equal(torch.stack(asked(language_model).hidden_states), torch.stack(stock.hidden_states))
        assert cache.tally.prompt_misses == misses


def test_what_cannot_be_kept_is_said_once_and_computed_each_time(
    language_model: Qwen3ForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PromptCache(max_bytes=HIDDEN, tally=Tally())
    install(language_model, cache, "text_encoder")
    for _ in range(2):
        assert asked(language_model).cache.get_seq_length() == WORDS
        assert asked(language_model).hidden_states[0].shape == (1, WORDS, WIDTH)
        assert asked(language_model).hidden_states[1].shape == (1, WORDS, WIDTH)
    assert [record.getMessage() for record in caplog.records] == [
        "text_encoder: prompt cache is of no use where what is read of its answers is a DynamicCache"
    ]


def test_an_answer_larger_than_all_room_is_said(encoder: UMT5EncoderModel, caplog: pytest.LogCaptureFixture) -> None:
    cache = PromptCache(max_bytes=64, tally=Tally())
    install(encoder, cache, "text_encoder")
    for _ in range(2):
        embed(encoder, tokens(1, 2, 3))
    assert (cache.tally.prompt_hits, cache.used_bytes) == (0, 0)
    assert len(caplog.records) == 1
    assert "larger than all" in caplog.text


def test_masks_may_be_floats(encoder: UMT5EncoderModel) -> None:
    cache = PromptCache(max_bytes=1 << 20, tally=Tally())
    install(encoder, cache, "text_encoder")
    for _ in range(2):
        embed(encoder, tokens(1, 2), torch.ones(1, 2))
    assert (cache.tally.prompt_hits, cache.tally.prompt_misses) == (1, 1)
