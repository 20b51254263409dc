"""What a team cannot share is said before any weights are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triptych.accel.parallel.team import Team
from triptych.errors import ConfigError
from triptych.parallelism import Parallelism
from triptych.pipeline.sharing import PictureSharing


def test_a_vae_without_known_strips_is_refused_by_name() -> None:
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(decoder_tp=2))
    present = {"vae": ("diffusers", "AutoencoderKL"), "text_encoder": ("transformers", "T5EncoderModel")}
    components = {"vae": SimpleNamespace(config={}), "text_encoder": SimpleNamespace(config={})}
    with pytest.raises(ConfigError, match=r"decoder-tp=2: strips are known for .* not for AutoencoderKL$"):
        PictureSharing(team, present, components)
