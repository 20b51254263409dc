"""Text encoders that the tiny checkpoints of several classic pipelines have."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPTextConfig,
    T5Config,
    T5EncoderModel,
)

from .checkpoints import seeded


def t5(tokenizer: Any) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer) + 8, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return seeded(T5EncoderModel, config)


def clip_text_config(tokenizer: Any, **changes: Any) -> CLIPTextConfig:
    size = len(tokenizer)
    config = {
        "vocab_size": size, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3,
        "num_attention_heads": 4, "bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1,
        "projection_dim": 32,
    }  # fmt: skip
    return CLIPTextConfig(**(config | changes))
