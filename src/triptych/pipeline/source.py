"""Where a model comes from: an embedded name, a local Diffusers folder, or those parts of a Hub id that are needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from triptych.errors import ModelError, ModelUnreachable
from triptych.models import EMBEDDED
from triptych.pipeline.variants import PRECISIONS, has_weights

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
"""What Diffusers' modular pipelines save instead, alone or beside the other one."""

_CONFIGS = ("*.json", "*.txt", "*.jinja", "tokenizer*/*", "processor*/*")
_WEIGHTS = ("safetensors", "safetensors.index.json", "json")
_VARIANTS = ("*/*.*.safetensors",)
"""Second copies of the weights, as ``model.fp16.safetensors`` beside ``model.safetensors``, which nothing loads; they
are fetched only for a component that has no others."""


def resolve_source(path: str, components: Iterable[str] | None = None, revision: str | None = None) -> Path:
    """The local folder of a model.

    ``path`` is an embedded name (``tiny``), a Diffusers-layout folder, or a Hub id. For a Hub id, configs and
    tokenizers are always fetched and weights only for ``components``; None fetches no weights. ``revision`` is a
    branch, tag or commit of a Hub id.
    Raises `ModelError` that says what was tried.
    """
    local = local_folder(path, revision)
    if local is not None:
        return local
    names = list(components or ())
    patterns = [*_CONFIGS, *(f"{name}/*.{kind}" for name in names for kind in _WEIGHTS)]
    fetched = _fetch(path, revision, patterns, _VARIANTS)
    for precision in PRECISIONS:
        lacking = [name for name in names if (fetched / name / "config.json").is_file()]
        lacking = [name for name in lacking if not has_weights(fetched / name)]
        if not lacking:
            break
        forms = (f".{precision}.safetensors", f".{precision}-*.safetensors")
        fetched = _fetch(path, revision, [*_CONFIGS, *(f"{name}/*{form}" for name in lacking for form in forms)])
    return fetched


def local_folder(path: str, revision: str | None = None) -> Path | None:
    """The folder of a model of this machine, None for a Hub id. Raises `ModelError` for what is neither."""
    if revision is not None and (path in EMBEDDED or Path(path).expanduser().is_dir()):
        raise ModelError(
            f"revision {revision!r}: model {path!r} is on this machine, only those of the Hub have revisions"
        )
    if path in EMBEDDED:
        return EMBEDDED[path]
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not _has_index(folder):
            raise ModelError(
                f"model {path!r}: the folder has no {INDEX} nor {MODULAR_INDEX}, so it is not a Diffusers pipeline"
            )
        return folder
    if not _is_hub_id(path):
        raise ModelError(
            f"model {path!r}: no such folder; give a Diffusers folder, a Hub id like owner/name, "
            f"or an embedded model ({', '.join(sorted(EMBEDDED))})"
        )
    return None


def commit_of(path: str, folder: Path) -> str:
    """The commit of the model ``path`` that was found in ``folder``; empty for one that is not from the Hub."""
    fetched = folder.parent.name == "snapshots" and path not in EMBEDDED and not Path(path).expanduser().is_dir()
    return folder.name if fetched else ""


def spelled(path: str) -> str:
    """The name of a model without what says nothing: ``wan`` for ``./wan/``, the folder's own for ``.``."""
    plain = PurePath(path)
    return str(plain if plain.name not in ("", "..") else Path(path).resolve())


def read_index(folder: Path) -> dict[str, Any]:
    """The pipeline's index: class name, configuration values, and [library, class] of each component.

    A folder that has only the index of a modular pipeline gives that in the same form.
    """
    name = INDEX if (folder / INDEX).is_file() else MODULAR_INDEX
    try:
        index = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model {str(folder)!r}: {name} cannot be read: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ModelError(f"model {str(folder)!r}: {name} does not name a pipeline class")
    return index if name == INDEX else _plain(folder, index)


def _plain(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    """A modular index without what it says of each component's place: that is the folder itself.

    Raises `ModelError` for a component that lies elsewhere, because one request would fetch from several places.
    """
    found: dict[str, Any] = {}
    for name, entry in index.items():
        match entry:
            case [library, kind, {**place}]:
                if kind is not None and place.get("subfolder") != name:
                    raise ModelError(
                        f"component {name!r}: is kept in {place.get('pretrained_model_name_or_path')!r} under "
                        f"{place.get('subfolder')!r}; put it into {str(folder / name)!r}"
                    )
                found[name] = [library, kind]
            case _:
                found[name] = entry
    return found


def _has_index(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / MODULAR_INDEX).is_file()


def index_components(index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Component name -> (library, class name) of what the checkpoint really has."""
    return {
        name: (value[0], value[1])
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    }


def _is_hub_id(path: str) -> bool:
    owner, _, name = path.partition("/")
    return bool(owner and name) and "/" not in name and not path.startswith((".", "~"))


def _fetch(repo: str, revision: str | None, patterns: list[str], ignored: Sequence[str] = ()) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=list(ignored))
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        kind = ModelUnreachable if _may_pass(error) else ModelError
        said = f"model {repo!r}" if revision is None else f"model {repo!r}, revision {revision!r}"
        raise kind(f"{said}: neither a local folder nor to be had from the Hub: {error}") from error
    if not _has_index(folder):
        raise ModelError(
            f"model {repo!r}: the repository has no {INDEX} nor {MODULAR_INDEX}, so it is not a Diffusers pipeline"
        )
    return folder


def _may_pass(error: Exception) -> bool:
    """Whether the Hub may answer otherwise in a while: it or the way to it is out of order, as far as one can see."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError)
