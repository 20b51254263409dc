"""Which classic pipeline classes Diffusers has a modular counterpart for, read without importing any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from triptych.errors import ModelError
from triptych.pipeline.families import MODULAR_NAMES, PICTURE_NAMES, Family
from triptych.pipeline.tasks import automatic_pipelines

REPLAYED = frozenset({"StableDiffusionXLPipeline"})
"""Classes that have modular blocks which are not three parts: their encoder touches the U-Net."""

REPLAYED_SETTINGS = frozenset({"expand_timesteps"})
"""Settings of a classic pipeline that its blocks know nothing of: a model that has one of them on is replayed."""


def modular_counterpart(index: Mapping[str, Any]) -> str | None:
    """The modular class for a model index; None where the model is to be replayed."""
    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    if index["_class_name"].endswith(_MODULAR):
        return _own(index)
    if index["_class_name"] in REPLAYED or any(index.get(name) for name in REPLAYED_SETTINGS):
        return None
    counterparts: Mapping[str | None, Callable[[Mapping[str, Any]], str]] = {**MODULAR_PIPELINE_MAPPING}
    name = counterparts.get(modular_name(index["_class_name"]))
    return None if name is None else name(index)


_MODULAR = "ModularPipeline"


def _own(index: Mapping[str, Any]) -> str:
    """The class of a model that was saved as a modular pipeline; raises `ModelError` for blocks of its own."""
    import diffusers

    name = index["_class_name"]
    default = getattr(getattr(diffusers, name, None), "default_blocks_name", None)
    blocks = index.get("_blocks_class_name", default)
    if default is None or blocks not in (default, "SequentialPipelineBlocks"):
        raise ModelError(f"{name} cannot be served: its blocks {blocks!r} are not those that Diffusers has for it")
    return name


def modular_name(classic: str) -> str | None:
    """Diffusers' name of a classic class's family; None for a class that it lists nowhere."""
    return MODULAR_NAMES.get(classic) or PICTURE_NAMES.get(classic) or _automatic_names().get(classic)


def whether_picture(
    index: Mapping[str, Any], family: Family, task: str | None = None
) -> Literal["needed", "optional", "unsaid"]:
    """Whether a model is given a picture that its blocks could do without; see `cut`. ``task`` is what is asked of
    it."""
    if index["_class_name"] in PICTURE_NAMES or family.pictures.needed:
        return "needed"
    if not family.pictures.optional or task in ("text-to-image", "text-to-video"):
        return "unsaid"
    return "optional" if task is None else "needed"


@functools.cache
def _automatic_names() -> dict[str, str]:
    """Class to family, for the class that Diffusers' automatic pipelines list first for a family.

    The others of a family start from an image, a mask or a video, which the blocks would leave out unasked.
    """
    found: dict[str, str] = {}
    for listed in automatic_pipelines().values():
        for family, classic in listed.items():
            found.setdefault(family, classic)
    return {classic: family for family, classic in found.items()}
