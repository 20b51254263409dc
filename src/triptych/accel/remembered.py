"""Tensors that a forward may read besides its arguments and weights: those that it, or a function, remembers of calls.

Diffusers' models keep the frequencies of rotary embeddings: as attributes of a module, or in a `functools.lru_cache`,
which lets the oldest go. Who reads them without calling the model, as a recording does, must hold them itself.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_CACHE: Final[Any] = type(functools.lru_cache(len))


def forget(model: nn.Module) -> None:
    """Empty the bounded caches that hold tensors, so that after a forward of ``model`` they hold those that it read."""
    for cache in _caches(model):
        if _held(cache):
            cache.cache_clear()


def remembered(model: nn.Module) -> list[Tensor]:
    """What modules of ``model`` have for attributes, and what bounded caches hold of methods and of functions beside.

    Parameters aside, which are changed in place if at all. What an unbounded cache holds stays there.
    """
    own = [leaf for module in model.modules() for leaf in _tensors(vars(module))]
    return own + [tensor for cache in _caches(model) for tensor in _held(cache)]


def _caches(model: nn.Module) -> list[Any]:
    """Bounded caches among what the classes of ``model`` and of its modules define, and the files that they are in."""
    classes = {made for module in model.modules() for made in type(module).__mro__}
    files = [sys.modules[name] for name in {made.__module__ for made in classes} if name in sys.modules]
    found: dict[int, Any] = {}
    for place in (*classes, *files):
        things: list[Any] = list(vars(place).values())  # a copy, as others may import meanwhile
        for thing in things:
            for cache in (thing, *_enclosed(thing)):
                if type(cache) is _CACHE and cache.cache_parameters()["maxsize"] is not None:
                    found[id(cache)] = cache
    return list(found.values())


def _enclosed(thing: Any) -> list[Any]:
    """What a function has in its closure, where Diffusers' own decorator has the cache."""
    cells = (thing.__closure__ or ()) if type(thing) is FunctionType else ()
    return [content for cell in cells for content in gc.get_referents(cell)]


def _held(cache: Any) -> list[Tensor]:
    """A cache refers to its results one by one."""
    return [tensor for result in gc.get_referents(cache) for tensor in _tensors(result)]


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
            yield leaf
