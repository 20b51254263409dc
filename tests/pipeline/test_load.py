"""Loading one role: its weights and no others, errors by component name, overrides that take effect."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from triptych.config import ModelConfig
from triptych.errors import ModelError, StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline

from .harness import Trio, finish, latents, lone_folder

REQUEST = {
    "prompt": "a cat", "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 32,
    "seed": 4,
}  # fmt: skip

Checkpoint = Callable[[str], Path]


def load(folder: Path | str, *roles: Role, dtype: str | None = None, **components: str):
    config = ModelConfig(path=str(folder), device="cpu", dtype=dtype, components=components)
    return load_pipeline(config, roles, "cpu")


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_each_role_has_its_own_weights_and_stand_ins_for_the_rest(checkpoint: Checkpoint) -> None:
    denoiser = load(checkpoint("wan_t2v"), Role.DENOISER)
    assert denoiser.roles == (Role.DENOISER,)
    assert denoiser.component(Role.DENOISER, "transformer").device.type == "cpu"
    vae = denoiser.component(Role.DENOISER, "vae")
    assert {parameter.device.type for parameter in vae.parameters()} == {"meta"}
    assert vae.config.z_dim == 16
    assert not hasattr(denoiser.component(Role.DENOISER, "text_encoder"), "parameters")


@pytest.mark.parametrize("role", ROLES)
def test_stand_ins_do_not_lend_a_role_their_device(checkpoint: Checkpoint, role: Role) -> None:
    """Qwen-Image's encoder part declares a VAE that text-to-image does not load."""
    pipeline = load(checkpoint("qwen_t2i"), role).pipeline(role)
    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert modules
    assert all(parameter.device.type == "cpu" for module in modules for parameter in module.parameters())
    assert pipeline.vae_scale_factor == 8


def test_weights_come_in_the_asked_dtype(checkpoint: Checkpoint) -> None:
    decoder = load(checkpoint("wan_t2v"), Role.DECODER, dtype="bfloat16")
    assert decoder.component(Role.DECODER, "vae").dtype == torch.bfloat16
    assert "bfloat16" in decoder.fingerprint


def test_guiders_and_processors_are_those_of_the_whole_pipeline(checkpoint: Checkpoint) -> None:
    """Built alone, Wan2.2's denoise part would make a guider of scale 4 instead of the whole pipeline's 5."""
    whole = load(checkpoint("wan22_t2v"), *ROLES)
    for role in (Role.ENCODER, Role.DENOISER):
        assert load(checkpoint("wan22_t2v"), role).component(role, "guider").guidance_scale == 5.0
        assert whole.component(role, "guider").guidance_scale == 5.0


def test_roles_in_one_process_give_the_same_as_three(checkpoint: Checkpoint, tmp_path: Path) -> None:
    trio = Trio(checkpoint("wan_t2v"), tmp_path)
    (expected,) = trio.generate(REQUEST)
    one = load(checkpoint("wan_t2v"), *ROLES)
    assert one.roles == ROLES
    (clip,) = Trio.of(dict.fromkeys(ROLES, one)).generate(REQUEST)
    assert (clip.frames == expected.frames).all()


def test_a_role_that_is_not_loaded_cannot_start(checkpoint: Checkpoint) -> None:
    with pytest.raises(StageError, match="the denoiser is not loaded here, only encoder"):
        load(checkpoint("wan_t2v"), Role.ENCODER).start(Role.DENOISER, REQUEST, [], ())


@pytest.mark.parametrize(
    ("role", "component"), [(Role.ENCODER, "text_encoder"), (Role.DENOISER, "transformer"), (Role.DECODER, "vae")]
)
def test_missing_weights_are_an_error_that_names_the_component(
    checkpoint: Checkpoint, tmp_path: Path, role: Role, component: str
) -> None:
    folder = copy_of(checkpoint("wan_t2v"), tmp_path / "model")
    for file in (folder / component).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=f"component '{component}' cannot be loaded"):
        load(folder, role)


def test_a_component_that_the_index_lacks_is_an_error_that_names_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy_of(checkpoint("wan_t2v"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    del index["tokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="component 'tokenizer', which the encoder needs"):
        load(folder, Role.ENCODER)
    load(folder, Role.DECODER)


def test_a_missing_config_of_another_role_is_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without it the roles would disagree about sizes without a word."""
    folder = copy_of(checkpoint("wan_t2v"), tmp_path / "model")
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(ModelError, match="component 'vae': its config cannot be read"):
        load(folder, Role.DENOISER)


@pytest.mark.parametrize("pickled", ["diffusion_pytorch_model.bin"])
def test_pickled_weights_are_not_read(checkpoint: Checkpoint, tmp_path: Path, pickled: str) -> None:
    folder = copy_of(checkpoint("wan_t2v"), tmp_path / "model")
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(weights), folder / "vae" / pickled)
    weights.unlink()
    with pytest.raises(ModelError, match="component 'vae' cannot be loaded"):
        load(folder, Role.DECODER)


def test_a_pipeline_without_modular_counterpart_is_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy_of(checkpoint("wan_t2v"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "NoSuchPipeline"}))
    with warnings.catch_warnings():
        # Diffusers' own table imports all of its pipelines, one of which uses a deprecated decorator.
        warnings.simplefilter("ignore")
        with pytest.raises(ModelError, match="no modular pipeline for NoSuchPipeline"):
            load(folder, Role.DECODER)


def changed_weights(file: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, target, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("shape", ["component folder", "pipeline folder", "file"])
@pytest.mark.parametrize(
    ("role", "component", "weights"),
    [
        (Role.ENCODER, "text_encoder", "model.safetensors"),
        (Role.DENOISER, "transformer", "diffusion_pytorch_model.safetensors"),
    ],
)
def test_a_component_override_takes_effect(
    checkpoint: Checkpoint, tmp_path: Path, shape: str, role: Role, component: str, weights: str
) -> None:
    model = checkpoint("wan_t2v")
    own = tmp_path / "other" / component
    shutil.copytree(model / component, own)
    changed = changed_weights(model / component / weights, own / weights)
    path = {"component folder": own, "pipeline folder": own.parent, "file": changed}[shape]
    # The folder of the model itself has no weights of that component: only the override can have been read.
    keep = next(other for other in ROLES if other is not role)
    folder = lone_folder(model, keep, tmp_path / "model")
    loaded = load(folder, role, **{component: str(path)})
    expected = load_file(changed)
    state = loaded.component(role, component).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert loaded.component(role, component).training is False


@pytest.mark.parametrize("family", ["wan_t2v", "cogvideox_t2v"])
def test_weights_that_are_replaced_are_not_fetched(
    checkpoint: Checkpoint, classic_checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the model is cut or replayed."""
    from huggingface_hub.utils import filter_repo_objects

    model = (checkpoint if family == "wan_t2v" else classic_checkpoint)(family)
    files = [str(file.relative_to(model)) for file in model.rglob("*") if file.is_file()]
    fetched: set[str] = set()

    def download(repo: str, *, revision: str | None, **patterns: Any) -> str:
        fetched.update(filter_repo_objects(files, **patterns))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load("owner/model", *ROLES, transformer=str(model / "transformer"))
    assert {file.split("/")[0] for file in fetched if file.endswith(".safetensors")} == {"text_encoder", "vae"}
    assert "transformer/config.json" in fetched


@pytest.mark.parametrize("family", ["wan_t2v", "cogvideox_t2v"])
def test_all_of_a_model_is_of_the_commit_that_its_branch_was_at_first(
    checkpoint: Checkpoint,
    classic_checkpoint: Checkpoint,
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Symptom: configs of one commit and weights of the next, where the branch moved while an instance loaded."""
    model = (checkpoint if family == "wan_t2v" else classic_checkpoint)(family)
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        (tmp_path / "snapshots").mkdir(exist_ok=True)
        (tmp_path / "snapshots" / commit).symlink_to(model)
    asked: list[str | None] = []

    def download(repo: str, *, revision: str | None, **patterns: Any) -> str:
        asked.append(revision)
        commit = commits[min(len(asked), 2) - 1] if revision == "main" else revision
        return str(tmp_path / "snapshots" / str(commit))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    caplog.set_level("INFO", "triptych.pipeline.load")
    config = ModelConfig(path="owner/model", revision="main", device="cpu")
    loaded = load_pipeline(config, (Role.DECODER,), "cpu")
    assert asked == ["main", "a" * 40]
    assert loaded.schema.commit == "a" * 40
    assert f"model=owner/model commit={'a' * 40} revision=main" in caplog.text


def test_an_override_changes_what_is_computed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    trio = Trio(checkpoint("wan_t2v"), tmp_path / "trio")
    inbox = trio.encoded(REQUEST)
    weights = "diffusion_pytorch_model.safetensors"
    changed = changed_weights(checkpoint("wan_t2v") / "transformer" / weights, tmp_path / "changed.safetensors")
    trio.stage(Role.DENOISER, REQUEST, inbox)
    plain = latents(inbox)
    other = load(checkpoint("wan_t2v"), Role.DENOISER, transformer=str(changed))
    (output,) = finish(other.start(Role.DENOISER, REQUEST, inbox[Role.DENOISER], ())).outputs
    assert not torch.equal(output.tensors[0], plain)


@pytest.mark.parametrize(
    ("components", "named"),
    [
        ({"unet": "."}, "component 'unet': the model has no such component, only scheduler, text_encoder"),
        ({"transformer": "/nonexistent/weights"}, "component 'transformer': '/nonexistent/weights' does not exist"),
    ],
)
def test_a_wrong_override_is_refused(checkpoint: Checkpoint, components: dict[str, str], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        load(checkpoint("wan_t2v"), Role.ENCODER, **components)


def test_equal_set_ups_have_equal_fingerprints(checkpoint: Checkpoint) -> None:
    first, second = (load(checkpoint("wan_t2v"), role).fingerprint for role in (Role.ENCODER, Role.DECODER))
    assert first == second
    assert first != load(checkpoint("wan_t2v"), Role.DECODER, dtype="bfloat16").fingerprint
    assert first != load(checkpoint("wan_t2v"), Role.DECODER, vae=str(checkpoint("wan22_t2v"))).fingerprint
