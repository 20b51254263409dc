"""Which classic pipeline classes Diffusers has a modular counterpart for, read without importing any of them."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triptych.pipeline.families import MODULAR_NAMES

REPLAYED = frozenset({"StableDiffusionXLPipeline"})
"""Classes that have modular blocks which are not three parts: their encoder touches the U-Net."""

REPLAYED_SETTINGS = frozenset({"expand_timesteps"})
"""Settings of a classic pipeline that its blocks know nothing of: a model that has one of them on is replayed."""


def modular_counterpart(index: Mapping[str, Any]) -> str | None:
    """The modular class for a model index; None where the model is to be replayed."""
    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    if index["_class_name"] in REPLAYED or any(index.get(name) for name in REPLAYED_SETTINGS):
        return None
    counterparts: Mapping[str | None, Callable[[Mapping[str, Any]], str]] = {**MODULAR_PIPELINE_MAPPING}
    name = counterparts.get(modular_name(index["_class_name"]))
    return None if name is None else name(index)


def modular_name(classic: str) -> str | None:
    """Diffusers' name of a classic class's family; None for a class that it lists nowhere."""
    return MODULAR_NAMES.get(classic) or _automatic_names().get(classic)


@functools.cache
def _automatic_names() -> dict[str, str]:
    """Class to family, for the class that Diffusers' automatic pipelines list first for a family.

    The others of a family start from an image, a mask or a video, which the blocks would leave out unasked. Importing
    these lists would import every pipeline: seconds, and warnings of other libraries. Their source says it.
    """
    spec = importlib.util.find_spec("diffusers.pipelines.auto_pipeline")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(name)), ast.Name(id=classic)]):
                found.setdefault(name, classic)
            case _:
                continue
    return {classic: name for name, classic in found.items()}
