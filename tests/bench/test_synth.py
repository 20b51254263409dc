"""Model folders of random weights have the published sizes, and unknown names are refused with the known ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from triptych.bench import synth
from triptych.config import parse_shape
from triptych.errors import ConfigError
from triptych.pipeline.known import modular_counterpart
from triptych.pipeline.source import index_components, read_index


@pytest.mark.parametrize(
    ("name", "component", "billions"),
    [
        ("wan2.1-t2v-1.3b", "transformer", 1.42),
        ("wan2.1-t2v-14b", "transformer", 14.3),
        ("wan2.1-i2v-14b", "transformer", 16.4),
        ("wan2.1-t2v-1.3b", "text_encoder", 5.68),
        ("wan2.1-t2v-1.3b", "vae", 0.127),
        ("wan2.2-t2v-a14b", "transformer", 14.3),
        ("wan2.2-t2v-a14b", "transformer_2", 14.3),
        ("wan2.2-i2v-a14b", "transformer", 14.3),
        ("wan2.2-i2v-a14b", "transformer_2", 14.3),
        ("wan2.2-t2v-a14b", "vae", 0.127),
        ("qwen-image", "transformer", 20.4),
    ],
)
def test_sizes_are_the_published_ones(name: str, component: str, billions: float) -> None:
    model = synth.build(name, component, torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_diffusers_keeps_in_float32_is_kept() -> None:
    model = synth.build("wan2.1-t2v-1.3b", "transformer", torch.device("meta"), torch.bfloat16)
    parameters = dict(model.named_parameters())
    assert parameters["blocks.0.scale_shift_table"].dtype == torch.float32
    assert parameters["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16


def test_an_unknown_size_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'wan9': no such size; known: wan2\.1-t2v-1\.3b"):
        synth.write("wan9", tmp_path, torch.device("cpu"), torch.bfloat16)


def test_a_written_folder_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 1, "text_dim": 32}
    small = synth.Size(
        pipeline="WanPipeline",
        components={
            "transformer": ("diffusers", "WanTransformer3DModel", config),
            "scheduler": ("diffusers", "UniPCMultistepScheduler", {"flow_shift": 3.0}),
        },
    )
    monkeypatch.setitem(synth.SIZES, "small", small)
    told: list[Path] = []
    folders = synth.write("small", tmp_path / "model", torch.device("cpu"), torch.bfloat16, told=told.append)
    assert [folder.name for folder in folders] == ["transformer", "scheduler"]
    assert told == folders
    index = json.loads((tmp_path / "model/model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "model/transformer", torch_dtype=torch.bfloat16)
    assert torch.isfinite(loaded.patch_embedding.weight.float()).all()


@pytest.mark.parametrize(
    ("name", "kind", "boundary"),
    [
        ("wan2.1-t2v-14b", "WanModularPipeline", None),
        ("wan2.2-t2v-a14b", "Wan22ModularPipeline", 0.875),
        ("wan2.2-i2v-a14b", "Wan22Image2VideoModularPipeline", 0.9),
    ],
)
def test_a_folder_is_taken_for_the_published_pipeline(
    tmp_path: Path, name: str, kind: str, boundary: float | None
) -> None:
    synth.write_configs(name, tmp_path)
    index = read_index(tmp_path)
    assert modular_counterpart(index) == kind
    assert index.get("boundary_ratio") == boundary
    assert {"transformer", "transformer_2"} & index_components(index).keys() == (
        {"transformer"} if boundary is None else {"transformer", "transformer_2"}
    )


def test_two_transformers_of_one_configuration_take_the_room_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 1, "text_dim": 32}
    transformer = ("diffusers", "WanTransformer3DModel", config)
    small = synth.Size(
        pipeline="WanPipeline",
        components={"transformer": transformer, "transformer_2": transformer},
        settings={"boundary_ratio": 0.875},
    )
    monkeypatch.setitem(synth.SIZES, "small", small)
    for _ in range(2):  # and again into the same folder
        synth.write("small", tmp_path, torch.device("cpu"), torch.bfloat16)
        files = [next((tmp_path / component).glob("*.safetensors")) for component in ("transformer", "transformer_2")]
        assert files[0].samefile(files[1])
        loaded = WanTransformer3DModel.from_pretrained(tmp_path / "transformer_2", torch_dtype=torch.bfloat16)
        assert torch.isfinite(loaded.patch_embedding.weight.float()).all()


@pytest.mark.parametrize("text", ["832", "axbxc", "832x0x5", "8x8x8x8", ""])
def test_a_shape_says_how_it_is_written(text: str) -> None:
    with pytest.raises(ConfigError, match="must look like 832x480x81"):
        parse_shape("--shape", text)


def test_a_text_encoder_in_bfloat16_is_bfloat16_throughout_as_it_is_when_loaded() -> None:
    model = synth.build("wan2.1-t2v-1.3b", "text_encoder", torch.device("meta"), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
