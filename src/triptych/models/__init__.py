"""The models that ship inside the package, by name."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

_HERE: Final = Path(__file__).resolve().parent

EMBEDDED: Final[Mapping[str, Path]] = MappingProxyType({"tiny": _HERE / "tiny"})
"""Name of a shipped model -> folder of its Diffusers pipeline."""


def tiny_path() -> Path:
    """The folder of the embedded text-to-video model, as `WanPipeline.from_pretrained` takes it."""
    return EMBEDDED["tiny"]
