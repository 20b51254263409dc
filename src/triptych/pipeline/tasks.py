"""Other tasks of a model: the pipeline classes that Diffusers makes of the same weights.

Importing Diffusers' lists of them would import every pipeline: seconds, and warnings of other libraries. Their source
says it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from triptych.pipeline.families import UNLISTED

LISTS = {
    "text-to-image": "AUTO_TEXT2IMAGE_PIPELINES_MAPPING",
    "image-to-image": "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING",
    "inpainting": "AUTO_INPAINT_PIPELINES_MAPPING",
    "text-to-video": "AUTO_TEXT2VIDEO_PIPELINES_MAPPING",
    "image-to-video": "AUTO_IMAGE2VIDEO_PIPELINES_MAPPING",
}
"""Task to the name of Diffusers' list of pipelines for it."""


@functools.cache
def automatic_pipelines() -> dict[str, dict[str, str]]:
    """List name -> family -> pipeline class, in the order of the source."""
    spec = importlib.util.find_spec("diffusers.pipelines.auto_pipeline")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, dict[str, str]] = {}
    for statement in ast.parse(Path(spec.origin).read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                found[name] = dict(_pairs(call))
            case _:
                continue
    return found


def sibling(pipeline: str, task: str) -> str | None:
    """The class that does ``task`` with the weights of ``pipeline``; None when Diffusers has none."""
    wanted = automatic_pipelines()[LISTS[task]] | UNLISTED.get(task, {})
    if pipeline in wanted.values():
        return pipeline
    lists = (*automatic_pipelines().values(), *UNLISTED.values())
    families = [family for known in lists for family, kind in known.items() if kind == pipeline]
    return next((wanted[family] for family in families if family in wanted), None)


def _pairs(call: ast.Call) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for node in ast.walk(call):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(family)), ast.Name(id=kind)]):
                pairs.append((family, kind))
            case _:
                continue
    return pairs
