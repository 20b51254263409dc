"""What a team cannot share is said before any weights are read."""

from __future__ import annotations

from types import SimpleNamespace

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
