"""What a team cannot share is said, before any weights are read where it is known by then."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pipeline.modular_image_checkpoints import flux2_klein
from triptych.accel.parallel.team import Team
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.capabilities import model_capability
from triptych.pipeline.load import load_cold
from triptych.pipeline.sharing import PictureSharing, Shares, TextSharing


def test_a_vae_without_known_strips_is_refused_by_name() -> None:
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(decoder_tp=2), meet=lambda _: None)
    present = {"vae": ("diffusers", "AutoencoderKL"), "text_encoder": ("transformers", "T5EncoderModel")}
    components = {"vae": SimpleNamespace(config={}), "text_encoder": SimpleNamespace(config={})}
    with pytest.raises(ConfigError, match=r"decoder-tp=2: strips are known for .* not for AutoencoderKL$"):
        PictureSharing(team, present, components)


def test_a_text_encoder_whose_wide_layers_do_not_divide_is_refused() -> None:
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(encoder_tp=2), meet=lambda _: None)
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
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(encoder_tp=2), meet=lambda _: None)
    sharing = TextSharing(team, {"text_encoder": ("transformers", "T5EncoderModel")}, {"text_encoder": encoder})
    with pytest.raises(ConfigError, match="encoder-tp=2: text_encoder has a LoRA adapter"):
        sharing.share({"text_encoder": encoder})


def test_a_class_whose_steps_attend_to_keys_of_earlier_ones_is_on_one_gpu(tmp_path: Path) -> None:
    """Symptom: each GPU attended to its own tokens alone, and pictures were other ones than on one GPU."""
    folder = tmp_path / "model"
    flux2_klein(folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("Flux2KleinPipeline", "Flux2KleinKVPipeline"))
    assert not model_capability(str(folder)).ways
    config = ModelConfig(path=str(folder), device="cpu")
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(), meet=lambda _: None)
    with pytest.raises(ConfigError, match="num-gpus=2: steps of Flux2KleinKVPipeline attend to keys"):
        load_cold(config, (Role.DENOISER,), "cpu", team=team)


def heads(**values: int) -> SimpleNamespace:
    config = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12} | values
    return SimpleNamespace(_cp_plan={"rope": {}}, config=SimpleNamespace(**config, get=config.get))


def test_a_start_logs_how_the_gpus_share_the_work_and_why(caplog: pytest.LogCaptureFixture) -> None:
    team = Team(rank=0, size=8, device=torch.device("cpu"), wish=Parallelism(), meet=lambda _: None)
    components = {"transformer": heads()}
    with caplog.at_level(logging.INFO, "triptych"):
        shares = Shares(team, (Role.DENOISER,), {}, components, ["transformer"], guided=True)
    assert shares.words == "8 GPUs: cfg 2 x ulysses 4 with guidance, ulysses 4 x ring 2 without"
    assert f"{shares.words} (branches of guidance first, which is exact, then tokens, by 12 heads)" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("off", [False, True])
def test_gpus_that_would_compute_the_same_as_others_are_warned_of(off: bool, caplog: pytest.LogCaptureFixture) -> None:
    team = Team(rank=0, size=2, device=torch.device("cpu"), wish=Parallelism(), meet=lambda _: None)
    planless = heads()
    planless._cp_plan = None
    Shares(team, (Role.DENOISER,), {}, {"transformer": planless}, ["transformer"], guided=True, off=off)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "work for 1 of 2 GPUs" in warning
    assert "no complete plan in Diffusers" in warning
    assert ("by default" in warning) == off


def test_only_the_first_rank_says_it(caplog: pytest.LogCaptureFixture) -> None:
    team = Team(rank=1, size=2, device=torch.device("cpu"), wish=Parallelism(), meet=lambda _: None)
    with caplog.at_level(logging.INFO, "triptych"):
        Shares(team, (Role.DENOISER,), {}, {"transformer": heads()}, ["transformer"], guided=True)
    assert not caplog.records
