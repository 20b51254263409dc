"""The word-level tokenizer, and the bank of all training captions as token rows."""

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.tiny import captions
from tools.tiny.world import COUNTS

PAD, END, UNKNOWN = 0, 1, 2
LENGTH = 32
"""Tokens of a caption in training. The pipeline may pad further: see `dit_training.padding_weight`."""

Row = tuple[int, ...]


class Bank(NamedTuple):
    """Captions of every combination, for clips [0] and images [1]: `written` [2, n, each, LENGTH] token ids and
    `told` [2, n, each, 6] attribute values, where the number of values means "not told". Both int16."""

    written: Tensor
    told: Tensor


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<unk>", *captions.vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Token rows [n, LENGTH], int16."""
    rows = tokenizer(list(texts), padding="max_length", max_length=LENGTH, truncation=True)["input_ids"]
    return torch.tensor(rows, dtype=torch.int16)


def _write_many(rows: list[Row], each: int, seed: int) -> list[captions.Caption]:
    rng = random.Random(seed)
    return [captions.write(rng, row, image=image) for image in (False, True) for row in rows for _ in range(each)]


def build_bank(tokenizer: PreTrainedTokenizerFast, table: Tensor, each: int, seed: int) -> Bank:
    """Writes the captions on all cores. Call it before CUDA starts: the workers are forked."""
    parts = [[tuple(row) for row in part.tolist()] for part in table.chunk(64)]
    workers = min(cpu_count() or 1, len(parts))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        written = list(pool.map(_write_many, parts, [each] * len(parts), [seed + i for i in range(len(parts))]))
    unsaid = torch.tensor(COUNTS, dtype=torch.int16)
    ids, told = [], []
    for part, texts in zip(parts, written, strict=True):
        shape = (2, len(part), each, -1)
        said = torch.tensor([caption.said for caption in texts]).view(shape)
        values = torch.tensor(part, dtype=torch.int16)[None, :, None]
        ids.append(encode(tokenizer, [caption.text for caption in texts]).view(shape))
        told.append(torch.where(said, values, unsaid))
    return Bank(torch.cat(ids, 1), torch.cat(told, 1))


def complaints(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> Tensor:
    """Token rows [count, LENGTH] of negative prompts, int16."""
    rng = random.Random(seed)
    return encode(tokenizer, [captions.complaint(rng) for _ in range(count)])
