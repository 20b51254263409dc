"""One component with its weights: from its folder in the model, or from what overrides it."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from triptych.errors import ModelError
from triptych.pipeline.standin import component_class, meta_module

log = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"

LoadComponent: TypeAlias = Callable[[Path, str, tuple[str, str], str | None, torch.dtype, torch.device], Any]
"""What `load_component` is, or stands in for it."""


def load_component(
    folder: Path, name: str, entry: tuple[str, str], override: str | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """Component ``name`` of the model in ``folder``, whose index says (library, class) ``entry``.

    ``override`` is a folder in the component's own layout, a pipeline folder that has such a component, or a
    safetensors file: in the component's own layout, or in its authors' where Diffusers can convert that.
    Weights come on ``device`` in ``dtype`` without gradients. Pickled weights are never read.
    Raises `ModelError` that names the component.
    """
    kind: Any = component_class(name, *entry)
    begun = time.perf_counter()
    source = folder / name if override is None else Path(override).expanduser()
    try:
        if not issubclass(kind, torch.nn.Module):
            return kind.from_pretrained(str(source / name if (source / name).is_dir() else source))
        module = _module(folder, name, kind, source, dtype, device)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
        raise ModelError(f"component {name!r} cannot be loaded from {str(source)!r}: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    nbytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    log.info("%s: %.2f GiB read in %.2f s (%.2f GB/s)", name, nbytes / (1 << 30), seconds, nbytes / seconds / 1e9)
    return module


def _module(
    folder: Path, name: str, kind: Any, source: Path, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    if source.is_dir():
        return _from_folder(kind, source / name if (source / name).is_dir() else source, dtype, device)
    if source.suffix != SAFETENSORS:
        raise ValueError(f"must be a folder or a {SAFETENSORS} file")
    if _is_foreign(folder, name, kind, source):
        module = kind.from_single_file(
            str(source), config=str(folder), subfolder=name, dtype=dtype, local_files_only=True
        )
        _refuse_missing([key for key, parameter in module.named_parameters() if parameter.is_meta])
        return module
    with tempfile.TemporaryDirectory(prefix="triptych-") as staged:
        # Both libraries load from a folder; links give them one without a copy.
        stem = "diffusion_pytorch_model" if kind.__module__.startswith("diffusers.") else "model"
        (Path(staged) / "config.json").symlink_to((folder / name / "config.json").resolve())
        (Path(staged) / f"{stem}{SAFETENSORS}").symlink_to(source.resolve())
        return _from_folder(kind, Path(staged), dtype, device)


def _from_folder(kind: Any, source: Path, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Read tensor by tensor from the mapped file to ``device``, so that host memory never holds a second copy."""
    module, info = kind.from_pretrained(
        str(source),
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        output_loading_info=True,
        local_files_only=True,
    )
    _refuse_missing(sorted(info["missing_keys"]))
    return module


def _refuse_missing(keys: list[str]) -> None:
    """Both libraries would fill what is missing with random numbers and a log line."""
    if keys:
        raise ValueError(f"the weights lack {len(keys)} tensors, e.g. {keys[0]}")


def _is_foreign(folder: Path, name: str, kind: Any, file: Path) -> bool:
    """Whether a file names tensors that the component does not have, so that it must be in another layout."""
    from safetensors import safe_open

    if not hasattr(kind, "from_single_file"):
        return False
    with safe_open(file, "pt") as tensors:
        found = set(tensors.keys())
    return not found <= set(meta_module(folder, name, kind).state_dict())
