"""Which copy of a component's weights is read, where a folder has a variant of them, as ``model.fp16.safetensors``.

The plain copy is, where it is there; a variant only in its absence. Both libraries load one if told its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PRECISIONS: Final = ("fp16", "bf16")
"""Variants that are the same weights in fewer bits, in the order in which they are taken."""

_SHARD: Final = r"-\d{5}-of-\d{5}"
_WEIGHTS: Final = re.compile(rf"(?:diffusion_pytorch_)?model(?:{_SHARD})?(?:\.(\w+?))?(?:{_SHARD})?\.safetensors")


def variant_of(folder: Path) -> str | None:
    """The variant of the weights in ``folder`` that is to be loaded; None for the plain ones, or for no weights.

    Raises `ValueError` where the choice among several is not ours.
    """
    found = {variant for variant in map(_variant, _files(folder)) if variant is not None}
    if not found or "" in found:
        return None
    for precision in PRECISIONS:
        if precision in found:
            return precision
    if len(found) > 1:
        raise ValueError(f"there are weights in the variants {', '.join(sorted(found))} only; keep one of them")
    return found.pop()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder`` that are loaded, in order; all of them where that is not clear."""
    files = _files(folder)
    try:
        wanted = variant_of(folder) or ""
    except ValueError:
        return files
    return [file for file in files if _variant(file) in (wanted, None)]


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` has weights of any variant."""
    return any(_variant(file) is not None for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _variant(file: Path) -> str | None:
    """Empty for plain weights, None for another file."""
    found = _WEIGHTS.fullmatch(file.name)
    return None if found is None else found[1] or ""
