"""Tensors that a forward may read besides its arguments and weights: those that it, or a function, remembers of calls.

Diffusers' models keep the frequencies of rotary embeddings: as attributes of a module, or in a `functools.lru_cache`,
which lets the oldest go. Who reads them without calling the model, as a recording does, must hold them itself.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_CACHE: Final[Any] = type(functools.lru_cache(len))


def forget() -> None:
    """Empty the bounded caches that hold tensors, so that after a forward they hold those that it read."""
    for cache in _caches():
        if _held(cache):
            cache.cache_clear()


def remembered(model: nn.Module) -> list[Tensor]:
    """What modules of ``model`` have for attributes, and what bounded caches of functions hold, whosever they are.

    Parameters aside, which are changed in place if at all. What an unbounded cache holds stays there.
    """
    own = [leaf for module in model.modules() for leaf in _tensors(vars(module))]
    return own + [tensor for cache in _caches() for tensor in _held(cache)]


def _caches() -> list[Any]:
    # by type(), since isinstance() makes stand-ins of other libraries' modules import them
    caches = [thing for thing in gc.get_objects() if type(thing) is _CACHE]
    return [cache for cache in caches if cache.cache_parameters()["maxsize"] is not None]


def _held(cache: Any) -> list[Tensor]:
    """A cache refers to its results one by one."""
    return [tensor for result in gc.get_referents(cache) for tensor in _tensors(result)]


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
            yield leaf
