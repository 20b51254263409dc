"""Weightless stand-ins for the components of other roles.

Blocks ask components that they do not run for facts (compression factors, channel counts, latent statistics). Without
them Diffusers silently falls back to constants, so a role gets every other component in a form that has its real
config, and its real small buffers where the folder holds them, but no weights.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from triptych.errors import ModelError
from triptych.pipeline.variants import weight_files


class StandIn:
    """A module's attributes without being a module, so that a pipeline does not take its device for its own.

    What lies behind is on the meta device but for the small buffers that were read.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_module":
            raise AttributeError(name)
        return getattr(self._module, name)


class ConfigOnly:
    """A text or image model reduced to its config and dtype."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype


def component_class(name: str, library: str, class_name: str) -> type[Any]:
    """The class that a model index names; raises `ModelError` for one that the installed libraries lack.

    ``library`` is diffusers, transformers, or one of the packages of ``diffusers.pipelines``.
    """
    if library in ("diffusers", "transformers"):
        module: Any = importlib.import_module(library)
    else:
        module = getattr(importlib.import_module("diffusers.pipelines"), library, None)
    if module is None:
        raise ModelError(f"component {name!r}: library {library!r} is neither diffusers nor transformers")
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ModelError(f"component {name!r}: the installed {library} has no class {class_name!r}")
    return found


def stand_in(folder: Path, name: str, library: str, class_name: str, dtype: torch.dtype) -> Any | None:
    """A stand-in for component ``name`` of a model folder; None for tokenizers and processors.

    Schedulers and other parts that consist of a config alone are loaded for real.
    """
    from transformers import PreTrainedModel

    kind: Any = component_class(name, library, class_name)
    try:
        if library == "transformers":
            if not issubclass(kind, PreTrainedModel):
                return None
            config_class: Any = kind.config_class
            return ConfigOnly(config_class.from_pretrained(folder / name), dtype)
        if issubclass(kind, torch.nn.Module):
            return StandIn(without_weights(folder, name, kind, dtype))
        return kind.from_pretrained(folder, subfolder=name) if hasattr(kind, "load_config") else None
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"component {name!r}: its config cannot be read: {error}") from error


def meta_module(folder: Path, name: str, kind: Any) -> torch.nn.Module:
    """Component ``name`` of class ``kind`` with its real config and no memory behind its tensors."""
    with torch.device("meta"):
        return kind.from_config(kind.load_config(str(folder), subfolder=name))


def without_weights(folder: Path, name: str, kind: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Component ``name`` of class ``kind`` on the meta device, but for the small buffers that the folder holds."""
    module = meta_module(folder, name, kind).to(dtype).eval().requires_grad_(False)
    _fill_buffers(module, folder / name, dtype)
    return module


def _fill_buffers(module: torch.nn.Module, folder: Path, dtype: torch.dtype) -> None:
    from safetensors import safe_open

    wanted = {name for name, _ in module.named_buffers()}
    if not wanted:
        return
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            for key in wanted.intersection(tensors.keys()):
                value = tensors.get_tensor(key)
                owner, _, leaf = key.rpartition(".")
                module.get_submodule(owner).register_buffer(
                    leaf, value.to(dtype) if value.is_floating_point() else value
                )
