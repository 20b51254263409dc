"""The reference of the stages' errors is the function that is measured, in float32; what is compiled is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.bench import stages, synth
from triptych.bench.stages import exact_forward, forward_of, relative, run
from triptych.bench.synth import SIZES, Size
from triptych.bench.timing import Times
from triptych.config import Shape

CPU = torch.device("cpu")
SHAPE = Shape(width=64, height=32, frames=5)
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "wan-small": ("WanTransformer3DModel", HEADS | {"ffn_dim": 64, "text_dim": 4096}),
    "wan-small-i2v": (
        "WanTransformer3DModel",
        HEADS | {"ffn_dim": 64, "text_dim": 4096, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 48},
    ),
    "wan-small-i2v-of-two": (
        "WanTransformer3DModel",
        HEADS | {"ffn_dim": 64, "text_dim": 4096, "in_channels": 36},
    ),
    "qwen-small": ("QwenImageTransformer2DModel", HEADS | {"axes_dims_rope": (8, 8, 8)}),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_error_of_bfloat16_is_a_rounding_of_the_float32_reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_grad_enabled(False)
    kind, config = SMALL[name]
    monkeypatch.setitem(SIZES, name, Size(pipeline="", components={"transformer": ("diffusers", kind, config)}))
    forward = forward_of(name, SHAPE, CPU)
    reference = exact_forward(name, forward, CPU)
    assert reference.dtype == torch.float32
    stock = forward(synth.build(name, "transformer", CPU, torch.bfloat16))
    assert stock.dtype == torch.bfloat16
    assert 1e-4 < relative(stock, reference) < 3e-2
    assert torch.equal(exact_forward(name, forward, CPU), reference)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A small size, measured on the CPU as on a GPU, with caches of its own."""
    components = {
        "transformer": ("diffusers", *SMALL["wan-small"]),
        "vae": ("diffusers", "AutoencoderKLWan", {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}),
    }
    monkeypatch.setitem(SIZES, "wan-small", Size(pipeline="", components=components))
    monkeypatch.setattr(stages, "_DEVICE", CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(stages, "first_call", lambda call: (call(), 1.0))
    monkeypatch.setattr(stages, "measure", lambda call, repeats, settles=False: Times(0.2, 0.1, 0.2, 1.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    return "wan-small"


def test_what_is_compiled_and_measured_lies_where_a_server_looks_for_it(
    small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Symptom: a session that measured stages and then served compiled everything twice."""
    caches: list[Path] = []
    monkeypatch.setattr(stages, "accelerate", lambda models, **options: caches.append(options["cache_dir"]))
    rows = list(run(small, SHAPE, ("lossless",), stages=("denoiser", "decoder")))
    assert [(row.stage, row.variant) for row in rows] == [
        (stage, variant) for stage in ("denoiser forward", "VAE decode") for variant in ("stock", "lossless")
    ]
    assert set(caches) == {tmp_path / "triptych"}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(os.environ[name]).parent == tmp_path / "triptych"


@pytest.mark.parametrize(("words", "references"), [([], 2), (["--no-error"], 0)])
def test_the_reference_is_computed_only_where_errors_are_wanted(
    small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], references: int
) -> None:
    exactly: list[None] = []

    def all_bits() -> nullcontext[None]:
        exactly.append(None)
        return nullcontext()

    monkeypatch.setattr(stages, "_all_bits", all_bits)
    monkeypatch.setattr(stages, "accelerate", lambda models, **options: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    assert stages.main([small, "--shape", "64x32x5", "--stages", "denoiser,decoder", *words]) == 0
    assert len(exactly) == references
    assert capsys.readouterr().out.count(", relative error") == 2 * references
