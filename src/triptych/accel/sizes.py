"""The sizes that models were rehearsed with, and whether the present forward has one of them.

What is made for one size takes long to make: so a size has its own where a warm-up has met it, and no request waits
because its size is new. A size that was rehearsed is always computed by what was made for it, whatever else was served
before: the others round differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_REHEARSING: ContextVar[bool] = ContextVar("rehearsing", default=False)


@contextmanager
def rehearsing() -> Generator[None]:
    """Have the sizes of all forwards of now known as rehearsed."""
    before = _REHEARSING.set(True)
    try:
        yield
    finally:
        _REHEARSING.reset(before)


def is_rehearsing() -> bool:
    """Whether the present forwards are of a rehearsal."""
    return _REHEARSING.get()


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The shapes of all tensors in the arguments of a call."""
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


class Sizes:
    """The sizes of all models of a role. Used from one thread."""

    def __init__(self) -> None:
        self.rehearsed = False
        """Whether the present forward has a size that was rehearsed."""
        self._known: set[Hashable] = set()

    def knows(self, *size: Hashable) -> bool:
        """Whether that was rehearsed, as it has been when this is part of a rehearsal."""
        if is_rehearsing():
            self._known.add(size)
        return size in self._known

    @contextmanager
    def of(self, *size: Hashable) -> Generator[None]:
        """Have the present forward be one of that size."""
        before, self.rehearsed = self.rehearsed, self.knows(*size)
        try:
            yield
        finally:
            self.rehearsed = before

    def install(self, name: str, model: nn.Module) -> None:
        """Have it known of each forward of ``model`` whether its size was rehearsed."""
        compute: Callable[..., Any] = model.forward

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.of(name, shapes_of(args, kwargs)):
                return compute(*args, **kwargs)

        model.forward = forward
