"""One component with its weights: from its folder in the model, or from what overrides it."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError

from triptych.errors import ModelError
from triptych.pipeline.staging import PIECE, PIECES, Staging, lane_to
from triptych.pipeline.standin import component_class, meta_module
from triptych.pipeline.streaming import from_pretrained
from triptych.pipeline.variants import variant_of, weight_files

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
        module, way = _module(folder, name, kind, source, dtype, device)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(f"component {name!r} cannot be loaded from {str(source)!r}: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    nbytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    rate = nbytes / seconds / 1e9
    log.info("%s: %.2f GiB read in %.2f s (%.2f GB/s), %s", name, nbytes / (1 << 30), seconds, rate, way)
    return module


def _module(
    folder: Path, name: str, kind: Any, source: Path, dtype: torch.dtype, device: torch.device
) -> tuple[torch.nn.Module, str]:
    """The module, and how its weights came."""
    if source.is_dir():
        return _from_folder(kind, source / name if (source / name).is_dir() else source, dtype, device)
    if source.suffix != SAFETENSORS:
        raise ValueError(f"must be a folder or a {SAFETENSORS} file")
    if _is_foreign(folder, name, kind, source):
        module = kind.from_single_file(
            str(source), config=str(folder), subfolder=name, dtype=dtype, local_files_only=True
        )
        _refuse_missing([key for key, parameter in module.named_parameters() if parameter.is_meta])
        return module, "converted in host memory"
    with tempfile.TemporaryDirectory(prefix="triptych-") as staged:
        # Both libraries load from a folder; links give them one without a copy.
        stem = "diffusion_pytorch_model" if kind.__module__.startswith("diffusers.") else "model"
        (Path(staged) / "config.json").symlink_to((folder / name / "config.json").resolve())
        (Path(staged) / f"{stem}{SAFETENSORS}").symlink_to(source.resolve())
        return _from_folder(kind, Path(staged), dtype, device)


def _from_folder(kind: Any, source: Path, dtype: torch.dtype, device: torch.device) -> tuple[torch.nn.Module, str]:
    """Read tensor by tensor to ``device``, so that host memory never holds a second copy."""
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "device_map": {"": device},
        "use_safetensors": True,
        "local_files_only": True,
    }
    if (variant := variant_of(source)) is not None:
        arguments["variant"] = variant
    lane = lane_to(device)
    if lane is None:
        module, info = kind.from_pretrained(str(source), output_loading_info=True, **arguments)
        way = "mapped"
    else:
        nbytes = sum(file.stat().st_size for file in weight_files(source))
        with Staging(lane, pieces=min(PIECES, 2 + nbytes // PIECE)) as staging:
            module, info = from_pretrained(kind, staging, str(source), **arguments)
        files = f"{staging.nbytes / (1 << 30):.2f} GiB of files"
        way = f"{files} through page-locked memory" if staging.nbytes else "mapped"
    _refuse_missing(sorted(info["missing_keys"]))
    return module, way


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
