"""What a model's folder holds, told without reading all of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from triptych.pipeline.content import content_of
from triptych.pipeline.source import spelled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model" / "transformer").mkdir(parents=True)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / "model" / "transformer" / "weights.safetensors")
    return tmp_path / "model"


def test_copies_of_a_folder_are_the_same(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    (copy / "README.md").write_text("not read by anybody")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "x.json").write_text("{}")
    (copy / ".cache" / "round").symlink_to(copy)
    assert content_of(copy) == content_of(folder)


def test_a_link_that_leads_in_circles_ends(folder: Path) -> None:
    for name in ("one", "other", "third"):
        (folder / "transformer" / name).symlink_to(folder)
    assert content_of(folder) == content_of(folder)


def test_another_training_of_the_same_architecture_is_another_model(folder: Path) -> None:
    """Symptom: hosts with different snapshots under one name had equal fingerprints, and resumed on other weights."""
    before = content_of(folder)
    weights = folder / "transformer" / "weights.safetensors"
    save_file({"w": load_file(weights)["w"] + 0.01}, weights)
    assert content_of(folder) != before


@pytest.mark.parametrize("change", ["setting", "name", "size", "dtype"])
def test_whatever_else_counts(folder: Path, change: str) -> None:
    before = content_of(folder)
    weights = folder / "transformer" / "weights.safetensors"
    match change:
        case "setting":
            (folder / "model_index.json").write_text('{"shift": 5}')
        case "name":
            weights.rename(folder / "transformer" / "other.safetensors")
        case "size":
            save_file({"w": torch.zeros((1 << 20) + 1)}, weights)
        case _:
            save_file({"w": torch.zeros(1 << 21, dtype=torch.float16)}, weights)
    assert content_of(folder) != before


def test_one_weight_of_a_small_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(100)}, file)
    before = content_of(file)
    save_file({"w": torch.zeros(100).index_fill(0, torch.tensor([57]), 1.0)}, file)
    assert content_of(file) != before
    other = file.rename(tmp_path / "same.safetensors")
    assert content_of(other) != before


def test_a_snapshot_of_the_hub_is_its_revision_whatever_was_fetched_of_it(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "models--owner--name" / "snapshots" / "0123456789abcdef"
    shutil.copytree(folder, whole)
    before = content_of(whole)
    shutil.rmtree(whole / "transformer")
    assert content_of(whole) == before == "revision 0123456789ab"


@pytest.mark.parametrize(
    ("said", "name"), [("./wan/", "wan"), ("/data/wan//", "/data/wan"), ("owner/wan", "owner/wan"), ("tiny", "tiny")]
)
def test_a_name_is_spelled_in_one_way(said: str, name: str) -> None:
    assert spelled(said) == name


def test_the_folder_that_one_is_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spelled(".") == str(tmp_path.resolve())
