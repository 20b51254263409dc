"""Where models come from: embedded names, folders, Hub ids."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.errors import Blame, ModelError
from triptych.models import EMBEDDED
from triptych.pipeline.source import index_components, read_index, resolve_source


def test_an_embedded_name_is_a_folder_with_an_index() -> None:
    assert resolve_source("tiny") == EMBEDDED["tiny"]
    assert read_index(resolve_source("tiny"))["_class_name"] == "WanPipeline"


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    assert resolve_source(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["./absent", "/absent/model", "tinny", "a/b/c"])
def test_what_is_neither_folder_nor_id_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match=r"no such folder.*embedded model \(tiny\)"):
        resolve_source(path)


def test_a_folder_without_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model_index\.json"):
        resolve_source(str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"_class_name": 3}'])
def test_an_unreadable_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model_index\.json"):
        read_index(tmp_path)


def test_absent_components_do_not_count(tmp_path: Path) -> None:
    index: dict[str, Any] = {"_class_name": "X", "vae": ["diffusers", "V"], "transformer_2": [None, None], "ratio": 1}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert index_components(read_index(tmp_path)) == {"vae": ("diffusers", "V")}


def test_a_hub_id_fetches_configs_and_the_asked_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked against the Hub client's own filter over the files of a real repository's layout."""
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "model_index.json", "README.md", "scheduler/scheduler_config.json", "tokenizer/spiece.model",
        "tokenizer/tokenizer.json", "text_encoder/config.json", "text_encoder/model-00001-of-00002.safetensors",
        "text_encoder/model.safetensors.index.json", "text_encoder/pytorch_model.bin", "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors", "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors", "unet/model.fp16-00001-of-00002.safetensors",
        "unet/model-00001-of-00002.safetensors", "unet/model-00001-of-00002.fp16.safetensors",
        "vae/diffusion_pytorch_model.bin", "assets/demo.mp4", "code.py",
    ]  # fmt: skip
    got: list[set[str]] = []

    def download(repo: str, *, revision: str | None, **patterns: Any) -> str:
        assert repo == "owner/model"
        got.append(set(filter_repo_objects(files, **patterns)))
        (tmp_path / "model_index.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("owner/model") == tmp_path
    assert resolve_source("owner/model", ["vae"]) == tmp_path
    assert resolve_source("owner/model", ["unet"]) == tmp_path
    assert not any(name.endswith((".safetensors", ".bin", ".py", ".mp4")) for name in got[0])
    assert {"tokenizer/spiece.model", "vae/config.json", "scheduler/scheduler_config.json"} <= got[0]
    assert got[1] - got[0] == {"vae/diffusion_pytorch_model.safetensors"}
    assert got[2] - got[0] == {"unet/model-00001-of-00002.safetensors"}


def test_weights_that_a_repository_has_as_a_variant_alone_are_fetched_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "model_index.json", "tokenizer/tokenizer_config.json", "text_encoder/config.json",
        "text_encoder/model.safetensors", "text_encoder/model.fp16.safetensors", "unet/config.json",
        "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors", "unet/diffusion_pytorch_model.bf16.safetensors",
        "unet/diffusion_pytorch_model.non_ema.safetensors", "vae/config.json",
        "vae/diffusion_pytorch_model.bf16.safetensors",
    ]  # fmt: skip

    def download(repo: str, *, revision: str | None, **patterns: Any) -> str:
        for name in filter_repo_objects(files, **patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_source("owner/model", ["tokenizer", "text_encoder", "unet", "vae"])
    assert sorted(file.name for file in tmp_path.rglob("*.safetensors")) == [
        "diffusion_pytorch_model.bf16.safetensors", "diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "model.safetensors",
    ]  # fmt: skip


def test_a_revision_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def download(repo: str, *, revision: str | None, **patterns: Any) -> str:
        asked.append(revision)
        (tmp_path / "model_index.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_source("owner/model")
    resolve_source("owner/model", ["vae"], "refs/pr/3")
    assert asked == [None, "refs/pr/3"]


def test_a_revision_of_a_model_on_this_machine_is_refused(tmp_path: Path) -> None:
    for model in ("tiny", str(tmp_path)):
        with pytest.raises(ModelError, match=r"revision 'v1': model .* is on this machine"):
            resolve_source(model, revision="v1")


def test_an_unreachable_hub_is_an_error_that_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"owner/no-such-model-anywhere.*neither a local folder nor"):
        resolve_source("owner/no-such-model-anywhere")


@pytest.mark.parametrize(("status", "passing"), [(503, True), (429, True), (401, False), (404, False)])
def test_a_hub_that_is_out_of_order_is_worth_another_try(
    monkeypatch: pytest.MonkeyPatch, status: int, passing: bool
) -> None:
    """Symptom: a 503 of the Hub at the first start ended the whole `triptych up`, as a model that is not there does."""
    from huggingface_hub.errors import HfHubHTTPError

    def refuse(*_: object, **__: object) -> str:
        error = HfHubHTTPError.__new__(HfHubHTTPError)
        error.response = SimpleNamespace(status_code=status)
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError) as caught:
        resolve_source("owner/model")
    assert (caught.value.blame is not Blame.OPERATOR) == passing


def test_a_hub_that_cannot_be_reached_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError) as caught:
        resolve_source("owner/model")
    assert caught.value.blame is not Blame.OPERATOR
