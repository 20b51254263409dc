"""What a team cannot share is said, before any weights are read where it is known by then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.accel.parallel.team import Team
from triptych.errors import ConfigError
from triptych.parallelism import Parallelism
from triptych.pipeline.sharing import PictureSharing, TextSharing


def test_a_vae_without_known_strips_is_refused_by_name() -> None:
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(decoder_tp=2))
    present = {"vae": ("diffusers", "AutoencoderKL"), "text_encoder": ("transformers", "T5EncoderModel")}
    components = {"vae": SimpleNamespace(config={}), "text_encoder": SimpleNamespace(config={})}
    with pytest.raises(ConfigError, match=r"decoder-tp=2: strips are known for .* not for AutoencoderKL$"):
        PictureSharing(team, present, components)


def test_a_text_encoder_whose_wide_layers_do_not_divide_is_refused() -> None:
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(encoder_tp=2))
    present = {"text_encoder": ("transformers", "T5EncoderModel")}
    components = {"text_encoder": SimpleNamespace(config=SimpleNamespace(num_heads=4, d_ff=37))}
    with pytest.raises(ConfigError, match="encoder-tp=2: must divide the 37 features of text_encoder's wide layers"):
        TextSharing(team, present, components)


def test_a_text_encoder_with_an_adapter_is_refused_with_the_reason() -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import T5Config, T5EncoderModel

    encoder: Any = T5EncoderModel(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    inject_adapter_in_model(LoraConfig(target_modules=["q"]), encoder, "fox")
    encoder.peft_config = {"fox": LoraConfig()}  # as Diffusers leaves it
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(encoder_tp=2))
    sharing = TextSharing(team, {"text_encoder": ("transformers", "T5EncoderModel")}, {"text_encoder": encoder})
    with pytest.raises(ConfigError, match="encoder-tp=2: text_encoder has a LoRA adapter"):
        sharing.share({"text_encoder": encoder})
