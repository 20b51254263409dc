"""Forwards of several requests in one: calls of a model are parked until all requests have come to theirs.

Theory of operation. Each request's loop runs in a greenlet. While forwards are collected, a call of the model switches
out of it instead of computing; whoever runs the loops gathers the parked calls, and those of equal shapes are joined
along the batch dimension, computed at once, and handed back. How many pay off is measured for each shape, by doubling:
on a GPU that one request fills, none do. What fails together is tried in halves, so that a call fails of nothing but
itself. Results differ from those of a request alone by rounding.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from triptych.accel.merging import Merged
from triptych.accel.shortage import free_memory, is_out_of_memory

log = logging.getLogger(__name__)

_GAIN: Final = 0.95
"""A batch twice as large must bring the time of each of its requests below this share of what it was."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One call of a model, in parts. ``result`` or ``error`` is set once it has been computed."""

    compute: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    key: Hashable
    """Equal for calls that can be joined."""
    result: Any = None
    error: Exception | None = None

    @property
    def batch(self) -> int:
        """Size of the batch dimension, which is that of the first tensor."""
        return next(leaf.shape[0] for leaf in self.leaves if isinstance(leaf, Tensor))


@dataclass(kw_only=True, slots=True)
class ForwardBatcher:
    """Joins calls of the models that it was installed in. Used from one thread."""

    most: int = 8
    """Largest number of requests in one forward."""
    collecting: bool = False
    """Whether calls are parked; else they compute at once."""
    profiling: bool = False
    """Whether shapes that are new are measured when they are met, also where nothing is collected."""
    caps: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    """Calls of a kind that are joined at most."""
    _merged: Merged = field(default_factory=Merged)

    def install(self, model: nn.Module) -> None:
        """Have the forwards of ``model`` go through this."""
        compute: Callable[..., Any] = model.forward

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.collecting and not self.profiling:
                return compute(*args, **kwargs)
            call = call_of(compute, args, kwargs)
            if self.profiling:
                self._cap(call)
            if not self.collecting:
                return compute(*args, **kwargs)
            runner = getcurrent().parent
            assert runner is not None
            return runner.switch(call)

        model.forward = forward

    def run(self, calls: Sequence[Call]) -> None:
        """Compute all ``calls``, joined where that pays; sets the result or the error of each."""
        groups: dict[Hashable, list[Call]] = {}
        for call in calls:
            groups.setdefault(call.key, []).append(call)
        for group in groups.values():
            while group:
                size = _power_of_two(min(len(group), self._cap(group[0]) if len(group) > 1 else 1))
                self._compute(group[:size])
                group = group[size:]

    def _compute(self, calls: Sequence[Call]) -> None:
        """Compute calls of one kind in one forward, or in halves where that cannot be done."""
        try:
            results = _joined(calls, self._merged)
        except Exception as error:
            if len(calls) == 1:  # the request fails of it, and says so itself
                calls[0].error = error
                return
            log.warning("batching: a forward of %d requests failed: %s: %s", len(calls), type(error).__name__, error)
            half = len(calls) // 2
            if is_out_of_memory(error):
                free_memory(error)
                self.caps[calls[0].key] = half
        else:
            for call, result in zip(calls, results, strict=True):
                call.result = result
            return
        for part in (calls[:half], calls[half:]):
            self._compute(part)

    def _cap(self, call: Call) -> int:
        """How many calls like this one are joined at most; measured when the kind is new. A call that fails alone is
        no measure: nothing is known of its kind then."""
        known = self.caps.get(call.key)
        if known is not None:
            return known
        best = _seconds(call, 1)
        if best is None:
            return 1
        size = 1
        while size * 2 <= self.most and (taken := _seconds(call, size * 2)) is not None:
            each = taken / (size * 2)
            if each > best * _GAIN:
                break
            size, best = size * 2, each
        self.caps[call.key] = size
        log.info("batching: up to %d requests in one forward, %.2f ms each (%s)", size, best * 1e3, _shapes(call))
        return size


def call_of(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, list))
    parts = tuple(
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves
    )
    return Call(compute=compute, leaves=leaves, spec=spec, key=(id(compute), str(spec), parts))


def _plain(value: Any) -> Hashable:
    """What tells two values apart that are no tensors. Lists of tensors are equal to nothing, so never joined."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, list) and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return repr(value)
    return id(value)


def _joined(calls: Sequence[Call], merged: Merged) -> list[Any]:
    first = calls[0]
    if len(calls) == 1:
        args, kwargs = pytree.tree_unflatten(first.leaves, first.spec)
        return [first.compute(*args, **kwargs)]
    leaves = [_merge(parts, first.batch, merged) for parts in zip(*(call.leaves for call in calls), strict=True)]
    args, kwargs = pytree.tree_unflatten(leaves, first.spec)
    outputs, spec = pytree.tree_flatten(first.compute(*args, **kwargs))
    split = [out.split(first.batch) if isinstance(out, Tensor) else [out] * len(calls) for out in outputs]
    return [pytree.tree_unflatten([parts[index] for parts in split], spec) for index in range(len(calls))]


def _merge(parts: tuple[Any, ...], batch: int, merged: Merged) -> Any:
    """The same argument of several calls as one: tensors and lists with an entry for each output are joined."""
    value = parts[0]
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch:
        return merged.of(parts)
    if isinstance(value, Tensor):
        if not all(torch.equal(value, other) for other in parts[1:]):
            raise ValueError(f"a tensor of shape {tuple(value.shape)} has no batch dimension and differs")
        return value
    if isinstance(value, list) and len(value) == batch:
        return [item for part in parts for item in part]
    return value


def _seconds(call: Call, count: int) -> float | None:
    """Seconds of one forward of ``count`` such calls, after one that is not counted; None when that fails."""
    taken = 0.0
    try:
        device, merged = next(leaf.device for leaf in call.leaves if isinstance(leaf, Tensor)), Merged()
        for _ in range(2):
            _wait(device)
            begun = time.perf_counter()
            _joined([call] * count, merged)
            _wait(device)
            taken = time.perf_counter() - begun
    except Exception as error:
        log.info("batching: a forward of %d requests cannot be measured: %s: %s", count, type(error).__name__, error)
        if is_out_of_memory(error):
            free_memory(error)
        return None
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _power_of_two(count: int) -> int:
    """The largest power of two that is not above ``count``: few batch sizes, few compiled graphs."""
    return 1 << (count.bit_length() - 1)


def _shapes(call: Call) -> str:
    return ", ".join("x".join(map(str, leaf.shape)) for leaf in call.leaves if isinstance(leaf, Tensor) and leaf.ndim)
