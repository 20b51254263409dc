"""A short string that is equal where the same inputs give the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from triptych.pipeline.content import content_of


def fingerprint(device: str, dtype: torch.dtype, weights: str, techniques: Sequence[str] = ()) -> str:
    """Versions, device, dtype, attention, ``weights`` (see `weights_of`) and acceleration, and a hash of all at the
    end."""
    from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND

    parts = (
        f"torch {torch.__version__}",
        f"diffusers {version('diffusers')}",
        f"transformers {version('transformers')}",
        device_name(device),
        str(dtype).removeprefix("torch."),
        f"attention {DIFFUSERS_ATTN_BACKEND}",
        f"tf32 {torch.backends.cuda.matmul.allow_tf32}",
        weights,
        *techniques,
    )
    text = ", ".join(parts)
    return f"{text}, {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def weights_of(folder: Path, overrides: Mapping[str, str]) -> str:
    """The model in ``folder``, and components in its ``overrides``. Where folders lie says nothing, what is in them
    does."""
    replaced = (f"{name} of {_content_of(path)}" for name, path in sorted(overrides.items()))
    return ", ".join((content_of(folder), *replaced))


def _content_of(path: str) -> str:
    there = Path(path).expanduser()
    return content_of(there) if there.exists() else path


def device_name(device: str) -> str:
    """The GPU's model, or the CPU's instruction set, which chooses the kernels there."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
