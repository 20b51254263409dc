"""The memory benchmark runs the real roles: random weights at a size, handoffs between processes, a row for each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from triptych.bench import memory, synth
from triptych.bench.memory_part import Part, Usage, hand_over_zeros, measure, request
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline

TRANSFORMER = {
    "num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 1, "text_dim": 32, "freq_dim": 32,
}  # fmt: skip
SMALL = synth.Size(
    pipeline="WanPipeline",
    components={
        "text_encoder": (
            "transformers",
            "UMT5EncoderModel",
            {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
        ),
        "transformer": ("diffusers", "WanTransformer3DModel", TRANSFORMER),
        "vae": ("diffusers", "AutoencoderKLWan", {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}),
        "scheduler": ("diffusers", "UniPCMultistepScheduler", {"flow_shift": 3.0, "use_flow_sigmas": True}),
        "tokenizer": ("transformers", "T5Tokenizer", {}),
    },
)
PARAMS = {"num_inference_steps": 1, "width": 32, "height": 32, "num_frames": 1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(synth.SIZES, "small", SMALL)
    synth.write_configs("small", tmp_path / "model")
    return tmp_path / "model"


def test_a_size_without_weights_is_run_role_by_role_with_random_ones(small: Path, tmp_path: Path) -> None:
    assert not list(small.rglob("*.safetensors"))
    handoffs = tmp_path / "handoffs"
    handoffs.mkdir()
    for role in ROLES:
        part = Part(
            folder=str(small), size="small", roles=(role,), handoffs=str(handoffs), params=PARAMS, device="cpu",
            dtype="float32",
        )  # fmt: skip
        usage = measure(part)
        assert usage.loaded is usage.allocated is usage.reserved is None
        assert usage.seconds is None  # nothing was read
        assert usage.resident > 50_000_000
    assert sorted(file.name for file in handoffs.glob("*.tree")) == [
        "decoder.denoiser.0.tree",
        "denoiser.encoder.0.tree",
    ]


def test_a_size_of_two_transformers_runs_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    components = {**SMALL.components, "transformer_2": SMALL.components["transformer"]}
    of_two = synth.Size(pipeline="WanPipeline", components=components, settings={"boundary_ratio": 0.875})
    monkeypatch.setitem(synth.SIZES, "of two", of_two)
    synth.write_configs("of two", tmp_path / "model")
    computed: list[int] = []
    forward = WanTransformer3DModel.forward

    def watched(self: WanTransformer3DModel, *args: Any, **kwargs: Any) -> Any:
        computed.append(id(self))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(WanTransformer3DModel, "forward", watched)
    measure(Part(
        folder=str(tmp_path / "model"), size="of two", roles=ROLES, handoffs=str(tmp_path), device="cpu",
        dtype="float32", params={**PARAMS, "num_inference_steps": 4},
    ))  # fmt: skip
    assert len(set(computed)) == 2


def test_random_weights_are_made_in_the_size_and_dtype_of_the_model(small: Path) -> None:
    config: Any = Part(folder=str(small), size="small", roles=ROLES, handoffs="", params={}, device="cpu").model
    made = synth.random_weights("small", torch.device("cpu"))
    pipeline: Any = load_pipeline(config, (Role.DENOISER,), "cpu", component=made)
    transformer = pipeline.component(Role.DENOISER, "transformer")
    assert isinstance(transformer, WanTransformer3DModel)
    assert transformer.config.ffn_dim == 64
    assert transformer.blocks[0].ffn.net[2].weight.std() > 0


def handed(folder: Path) -> dict[str, dict[str, tuple[list[int], str]]]:
    """Shape and dtype of all that was handed over, by file."""
    found: dict[str, dict[str, tuple[list[int], str]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        found[file.name] = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    return found


def test_zeros_have_the_shapes_of_what_the_roles_hand_over(small: Path, tmp_path: Path) -> None:
    real, zeros = tmp_path / "real", tmp_path / "zeros"
    for folder in (real, zeros):
        folder.mkdir()
    part = Part(folder=str(small), size="small", roles=ROLES, handoffs=str(real), params=PARAMS, device="cpu")
    measure(part)
    assert hand_over_zeros(msgspec.structs.replace(part, handoffs=str(zeros)), ROLES[:2])
    assert len(handed(real)) == 2
    assert handed(zeros) == handed(real)


def test_without_its_models_nothing_is_known_of_a_loop_that_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    part = Part(folder=str(tmp_path), size=None, roles=ROLES, handoffs=str(tmp_path), params=PARAMS, device="cpu")
    assert not hand_over_zeros(part, ROLES[:2])


@pytest.mark.parametrize(
    ("wanted", "known", "loaded"),
    [
        (["denoiser"], True, [Role.DENOISER]),
        (["encoder", "decoder"], True, [Role.ENCODER, Role.DECODER]),
        (["denoiser"], False, [Role.ENCODER, Role.DENOISER]),
    ],
)
def test_only_the_wanted_roles_are_loaded(
    monkeypatch: pytest.MonkeyPatch, wanted: list[str], known: bool, loaded: list[Role]
) -> None:
    """Symptom: to measure a denoiser, the text encoder's weights were made as well, for its handoff alone."""
    if not known:
        monkeypatch.setattr(memory, "hand_over_zeros", lambda part, roles: False)
    parts: list[Role] = []

    def measured(part: Part, roles: tuple[Role, ...]) -> Usage:
        parts.extend(roles)
        return measure(msgspec.structs.replace(part, roles=roles))

    monkeypatch.setattr(memory, "_measured", measured)
    part = Part(folder="tiny", size=None, roles=ROLES, handoffs="", params={"num_inference_steps": 1}, device="cpu")
    assert [name for name, _ in memory.rows(part, wanted)] == wanted
    assert parts == loaded


def test_an_option_reaches_the_model_that_is_measured(small: Path) -> None:
    part = Part(
        folder=str(small), size="small", roles=ROLES, handoffs="", params=PARAMS, device="cpu",
        offload={Role.DENOISER: "block"}, vae_tiling=True,
    )  # fmt: skip
    assert part.model.offload == {Role.DENOISER: "block"}
    assert part.model.vae_tiling


def test_a_model_that_starts_from_a_picture_gets_one() -> None:
    schema: Any = load_pipeline(Part(
        folder="tiny", size=None, roles=(Role.DECODER,), handoffs="", params={}, device="cpu",
    ).model, (Role.DECODER,), "cpu").schema  # fmt: skip
    params, images = request(schema, {"num_inference_steps": 3, "unheard_of": 1})
    assert params["num_inference_steps"] == 3
    assert "unheard_of" not in params
    assert not images


def test_every_row_is_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(["tiny", "--device", "cpu", "--steps", "1", "--roles", "encoder"]) == 0
    table = capsys.readouterr().out
    assert "encoder" in table
    assert "denoiser" not in table
    assert "n/a" in table
    (row,) = (line for line in table.splitlines() if line.startswith("│ encoder"))
    assert re.fullmatch(r"\d+\.\d", row.split("│")[2].strip()), "how long its start took"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["tiny", "--roles", "whole,painter"], "'painter' is none of whole,encoder,denoiser,decoder"),
        (["tiny", "--steps", "0"], "steps=0"),
        (["tiny", "--shape", "wide"], "--shape 'wide'"),
        (["tiny", "--offload", "half"], "--offload 'half'"),
    ],
)
def test_what_cannot_be_measured_is_said(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        memory.main(words)
