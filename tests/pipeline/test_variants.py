"""Folders that have their weights as a variant."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from triptych.config import ModelConfig
from triptych.errors import ModelError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.variants import variant_of, weight_files


def renamed(folder: Path, target: Path, *variants: str) -> Path:
    """The model in ``folder`` whose weights are in ``variants`` alone."""
    shutil.copytree(folder, target)
    for file in list(target.rglob("*.safetensors")):
        for variant in variants:
            shutil.copy(file, file.with_name(f"{file.stem}.{variant}.safetensors"))
        file.unlink()
    return target


def test_a_folder_with_variants_alone_is_served(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Symptom: "no file named model.safetensors"."""
    plain = checkpoint("wan_t2v")
    folder = renamed(plain, tmp_path / "model", "fp16")
    one, other = (load_pipeline(ModelConfig(path=str(path), device="cpu"), ROLES, "cpu") for path in (plain, folder))
    for role, name in ((Role.ENCODER, "text_encoder"), (Role.DENOISER, "transformer"), (Role.DECODER, "vae")):
        weights = one.component(role, name).state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in other.component(role, name).state_dict().items())


def test_one_of_several_variants_that_are_no_precisions_must_be_kept(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = renamed(checkpoint("wan_t2v"), tmp_path / "model", "ema", "non_ema")
    with pytest.raises(ModelError, match=r"component 'vae' .* variants ema, non_ema only; keep one"):
        load_pipeline(ModelConfig(path=str(folder), device="cpu"), (Role.DECODER,), "cpu")


@pytest.mark.parametrize(
    ("files", "variant", "read"),
    [
        ("model.safetensors model.fp16.safetensors", None, "model.safetensors"),
        ("model-00001-of-00002.safetensors model.fp16.safetensors", None, "model-00001-of-00002.safetensors"),
        ("model.fp16.safetensors model.bf16.safetensors", "fp16", "model.fp16.safetensors"),
        ("model.bf16-00001-of-00002.safetensors", "bf16", "model.bf16-00001-of-00002.safetensors"),
        ("model-00001-of-00002.fp16.safetensors", "fp16", "model-00001-of-00002.fp16.safetensors"),
        ("diffusion_pytorch_model.non_ema.safetensors", "non_ema", "diffusion_pytorch_model.non_ema.safetensors"),
        ("", None, ""),
    ],
)  # fmt: skip
def test_the_copy_that_is_read(tmp_path: Path, files: str, variant: str | None, read: str) -> None:
    for name in files.split():
        (tmp_path / name).touch()
    assert variant_of(tmp_path) == variant
    assert [file.name for file in weight_files(tmp_path)] == read.split()
