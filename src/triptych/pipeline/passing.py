"""What is changed in a pipeline's blocks before they are cut, where they do otherwise than the classic pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from triptych.pipeline.cut import walk


def pass_on(blocks: Any, as_given: Mapping[str, tuple[str, str]]) -> Any:
    """``blocks``, changed: every nested block that ``as_given`` names, to its input and output, passes that on.

    Such blocks would resize a picture that has the requested size already.
    """
    if as_given:
        for block in list(walk(blocks)):
            for name in block.sub_blocks.keys() & as_given.keys():
                block.sub_blocks[name] = _passing(*as_given[name])
    return blocks


def exchange(blocks: Any, others: Mapping[str, str]) -> Any:
    """``blocks``, changed: in the place of each top-level block that ``others`` names stands one of the class beside
    it, ``module:Class``, which does what that does and more."""
    for name, place in others.items():
        module, _, kind = place.partition(":")
        blocks.sub_blocks[name] = getattr(importlib.import_module(module), kind)()
    return blocks


def instruct(blocks: Any, message: str | None) -> Any:
    """``blocks``, changed: text blocks that begin with a message to the language model begin with this one, if any."""
    if message is not None:
        for block in walk(blocks):
            if hasattr(block, _MESSAGE):
                setattr(block, _MESSAGE, message)
    return blocks


_MESSAGE = "DEFAULT_SYSTEM_MESSAGE"
"""Where Diffusers' text blocks have it."""


def _passing(given: str, passed: str) -> Any:
    from diffusers.modular_pipelines.modular_pipeline import ModularPipelineBlocks
    from diffusers.modular_pipelines.modular_pipeline_utils import InputParam, OutputParam

    class Passing(ModularPipelineBlocks):
        """Files the entry ``given`` under the name ``passed``, too."""

        @property
        def description(self) -> str:
            return f"{passed} is {given}"

        @property
        def inputs(self) -> list[Any]:
            return [InputParam(given, required=True)]

        @property
        def intermediate_outputs(self) -> list[Any]:
            return [OutputParam(passed)]

        def __call__(self, components: Any, state: Any) -> Any:
            state.set(passed, state.get(given))
            return components, state

    return Passing()
