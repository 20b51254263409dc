"""Random numbers where the request's generator is, which is the CPU, also for blocks that ask for them on the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from triptych.pipeline.cut import walk


class WhereTheGeneratorIs(TorchFunctionMode):
    """Draws on the generator's device and moves what came, where torch would refuse to draw on another.

    It must be left before a greenlet switches: modes belong to the thread.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if not isinstance(generator, torch.Generator) or device is None:
            return func(*args, **kwargs)
        if torch.device(device).type == generator.device.type:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": generator.device}).to(device)


def draw_elsewhere(blocks: Any, kinds: Iterable[str]) -> Any:
    """``blocks``, changed: every nested one of the classes ``kinds`` draws where the generator is.

    None of them may call a model, at which a run could stop.
    """
    for block in walk(blocks):
        if type(block).__name__ in kinds:
            block.__class__ = _drawing(type(block))
    return blocks


def _drawing(kind: type[Any]) -> type[Any]:
    class Drawing(kind):
        def __call__(self, components: Any, state: Any) -> Any:
            with WhereTheGeneratorIs():
                return super().__call__(components, state)

    Drawing.__name__ = kind.__name__
    Drawing.__module__ = kind.__module__
    return Drawing
