"""Forwards of several requests in one: calls of a model are parked until all requests have come to theirs.

Theory of operation. Each request's loop runs in a greenlet. While forwards are collected, a call of the model switches
out of it instead of computing; whoever runs the loops gathers the parked calls, and those of equal shapes are joined
along the batch dimension, computed at once, and handed back. How many pay off is measured for each shape, by doubling:
on a GPU that one request fills, none do, and where one forward takes long, one does fill it. What fails together is
tried in halves, so that a call fails of nothing but itself. Of models that take texts of several lengths at once
(`triptych.accel.ragged`), calls with such texts are joined too; whether that pays off is measured apart, since it needs
a mask. Results differ from those of a request alone by rounding.
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
from triptych.accel.ragged import EVEN, Ragged, ragged_of
from triptych.accel.recordable import recorded_early
from triptych.accel.shortage import free_memory, is_out_of_memory
from triptych.accel.step_cache import Step, StepMemory

log = logging.getLogger(__name__)

MOST_AT_ONCE: Final = 8
"""Requests in one forward at most, however many are under way."""
SETTLED: Final = 8
"""Forwards after which a CUDA graph is there, if one is made (`triptych.accel.cuda_graphs`)."""
_SHORT: Final = 0.5
"""Seconds of measuring after which forwards are so long that their launch does not count."""
_LIKE: Final = 1.5
"""How much longer one of two forwards may take that are of the same kind. While a CUDA graph is made of one, it takes
four times as long or more, and is no measure."""
_FILLS: Final = 0.2
"""Seconds of a forward that is bound by what it computes: launching never takes so long. Two take twice that, which
need not be tried: it may be a shape to compile for a quarter of a minute."""
_PATIENCE: Final = 64
"""Forwards of as many requests as fit after memory had run out, after which twice as many are tried; each time that
these fail again, twice as many forwards."""
_GAIN: Final = 0.95
"""A batch twice as large must bring the time of each of its requests below this share of what it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What two calls have in common that can be joined, and the lengths in which they may differ."""

    key: Hashable
    lengths: tuple[int, ...]


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One call of a model, in parts. ``result`` or ``error`` is set once it has been computed."""

    compute: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    key: Hashable
    """Equal for calls that can be joined."""
    lengths: tuple[int, ...] = ()
    """Of what may be of several lengths in one forward."""
    lists: bool = False
    """Whether the model takes, and gives, lists with an entry for each output."""
    steps: Sequence[Step] = ()
    """The step that it is of, where steps keep something for the next ones."""
    result: Any = None
    error: Exception | None = None

    @property
    def kind(self) -> Kind:
        """What of it can be kept without keeping its tensors."""
        return Kind(key=self.key, lengths=self.lengths)

    @property
    def batch(self) -> int:
        """Size of the batch dimension, which is that of the first tensor."""
        return next(leaf.shape[0] for leaf in self.leaves if isinstance(leaf, Tensor))


@dataclass(kw_only=True, slots=True)
class _Shortage:
    """What there once was no memory for, which may have been for something that is gone."""

    size: int
    """Calls in one forward."""
    left: int = 0
    """Smaller forwards until it is tried again."""
    patience: int = _PATIENCE


@dataclass(kw_only=True, slots=True)
class ForwardBatcher:
    """Joins calls of the models that it was installed in. Used from one thread."""

    most: int = MOST_AT_ONCE
    """Largest number of requests in one forward."""
    brings_weights: bool = False
    """Whether a forward may be long of weights that come from host memory, once for all of its requests."""
    collecting: bool = False
    """Whether calls are parked; else they compute at once."""
    profiling: bool = False
    """Whether shapes that are new are measured when they are met, also where nothing is collected."""
    caps: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    """Calls of a kind that are joined at most."""
    memory: StepMemory = field(default_factory=StepMemory)
    """What the models may know of the steps whose forward is computed."""
    _merged: Merged = field(default_factory=Merged)
    _shortages: dict[Hashable, _Shortage] = field(default_factory=dict[Hashable, _Shortage])

    def install(self, model: nn.Module) -> None:
        """Have the forwards of ``model`` go through this."""
        compute: Callable[..., Any] = model.forward
        ragged = ragged_of(model)

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.collecting and not self.profiling:
                return compute(*args, **kwargs)
            call = call_of(compute, args, kwargs, ragged)
            if self.profiling:
                self._cap([call])
            if not self.collecting:
                return compute(*args, **kwargs)
            runner = getcurrent().parent
            assert runner is not None
            with self.memory.exchanged(()) as call.steps:
                return runner.switch(call)

        model.forward = forward

    def joined_at_most(self, kinds: Sequence[Kind]) -> int | None:
        """How many calls of these kinds, which differ in lengths alone, are joined; None when it was not measured."""
        return self.caps.get(_kind(kinds))

    def run(self, calls: Sequence[Call]) -> None:
        """Compute all ``calls``, joined where that pays; sets the result or the error of each."""
        groups: dict[Hashable, list[Call]] = {}
        for call in calls:
            groups.setdefault(call.key, []).append(call)
        for group in groups.values():
            if _kind(group) != group[0].key and self._cap(_mixed(group)) == 1:
                even: dict[tuple[int, ...], list[Call]] = {}
                for call in group:
                    even.setdefault(call.lengths, []).append(call)
                for part in even.values():
                    self._run_alike(part)
            else:
                self._run_alike(group)

    def _run_alike(self, group: list[Call]) -> None:
        """Compute calls that can be joined as they are."""
        while group:
            size = _power_of_two(min(len(group), self._cap(_mixed(group)) if len(group) > 1 else 1))
            self._compute(group[:size])
            group = group[size:]

    def _compute(self, calls: Sequence[Call]) -> None:
        """Compute calls of one kind in one forward, or in halves where that cannot be done."""
        try:
            with self.memory.exchanged(_steps(calls)):
                results = _joined(calls, self._merged)
        except Exception as error:
            if len(calls) == 1:  # the request fails of it, and says so itself
                calls[0].error = error
                return
            log.warning("batching: a forward of %d requests failed: %s: %s", len(calls), type(error).__name__, error)
            half = len(calls) // 2
            if is_out_of_memory(error):
                free_memory(error)
                self._lower(_kind(calls), half)
        else:
            for call, result in zip(calls, results, strict=True):
                call.result = result
            self._fitted(calls)
            return
        for part in (calls[:half], calls[half:]):
            self._compute(part)

    def _lower(self, kind: Hashable, size: int) -> None:
        """There was no memory for more calls of a kind than ``size``, now."""
        measured = self.caps.get(kind, size * 2)
        self.caps[kind] = size
        shortage = self._shortages.setdefault(kind, _Shortage(size=measured, patience=_PATIENCE // 2))
        shortage.patience *= 2
        shortage.left = shortage.patience

    def _fitted(self, calls: Sequence[Call]) -> None:
        """A forward was computed: after many of the largest size that fits, one of twice that is tried."""
        kind = _kind(calls)
        shortage = self._shortages.get(kind)
        if shortage is None or len(calls) < (cap := self.caps[kind]) or cap >= shortage.size:
            return
        shortage.left -= 1
        if shortage.left <= 0:
            shortage.left = shortage.patience
            self.caps[kind] = cap * 2

    def _cap(self, calls: Sequence[Call]) -> int:
        """How many calls like these, of one or by turns of two lengths, are joined at most; measured when the kind is
        new. A call that fails alone is no measure: nothing is known of its kind then."""
        kind = _kind(calls)
        known = self.caps.get(kind)
        if known is not None:
            return known
        best = self._seconds(calls, 1)
        if best is None:
            return 1
        size, most = 1, 1 if best > _FILLS and not self.brings_weights else self.most
        while size * 2 <= most and (taken := self._seconds(calls, size * 2)) is not None:
            each = taken / (size * 2)
            if each > best * _GAIN:
                break
            size, best = size * 2, each
        self.caps[kind] = size
        shapes = _shapes(calls[0]) + ("" if kind == calls[0].key else ", texts of several lengths")
        log.info("batching: up to %d requests in one forward, %.2f ms each (%s)", size, best * 1e3, shapes)
        return size

    def _seconds(self, calls: Sequence[Call], count: int) -> float | None:
        """See `_seconds`; what is computed to be measured belongs to no step."""
        with self.memory.exchanged(()), recorded_early():
            return _seconds(calls, count)


def call_of(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ragged: Ragged = EVEN) -> Call:
    """A call in parts, with equal keys for those that can be joined. ``ragged`` is what of it may differ in length."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_list)
    names = ragged.names(kwargs)
    parts: list[Hashable] = []
    lengths: list[int] = []
    for leaf in leaves:
        if id(leaf) not in names:
            parts.append((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else _plain(leaf))
        elif isinstance(leaf, Tensor):
            parts.append((leaf.shape[0], leaf.shape[2:], leaf.dtype, leaf.device))
            lengths.append(leaf.shape[1])
        else:
            parts.append((len(leaf), *((one.shape[1:], one.dtype, one.device) for one in leaf)))
            lengths.extend(one.shape[0] for one in leaf)
    return Call(
        compute=compute,
        leaves=leaves,
        spec=spec,
        key=(id(compute), str(spec), tuple(parts)),
        lengths=tuple(lengths),
        lists=not ragged.lists.isdisjoint(names.values()),
    )


def _kind(calls: Sequence[Call | Kind]) -> Hashable:
    """Under what it is remembered how many calls like these are joined."""
    key = calls[0].key
    return key if all(call.lengths == calls[0].lengths for call in calls) else ("of several lengths", key)


def _mixed(calls: Sequence[Call]) -> Sequence[Call]:
    """Two of ``calls`` of different lengths, or one."""
    other = next((call for call in calls if call.lengths != calls[0].lengths), None)
    return calls[:1] if other is None else [calls[0], other]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _plain(value: Any) -> Hashable:
    """What tells two values apart that are no tensors. Lists of tensors are equal to nothing, so never joined."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, list) and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return repr(value)
    return id(value)


def _steps(calls: Sequence[Call]) -> list[Step]:
    """The step of each call; one that is of none has one to itself, of which nothing is left."""
    return [step for call in calls for step in call.steps or (Step(),)]


def _joined(calls: Sequence[Call], merged: Merged) -> list[Any]:
    first = calls[0]
    if len(calls) == 1:
        args, kwargs = pytree.tree_unflatten(first.leaves, first.spec)
        return [first.compute(*args, **kwargs)]
    leaves = [_merge(parts, first.batch, merged) for parts in zip(*(call.leaves for call in calls), strict=True)]
    args, kwargs = pytree.tree_unflatten(leaves, first.spec)
    outputs, spec = pytree.tree_flatten(first.compute(*args, **kwargs), is_leaf=_is_list if first.lists else None)
    split = [_split(out, first.batch, len(calls)) for out in outputs]
    return [pytree.tree_unflatten([parts[index] for parts in split], spec) for index in range(len(calls))]


def _split(output: Any, batch: int, count: int) -> Sequence[Any]:
    """What of an output belongs to each of ``count`` calls."""
    if isinstance(output, Tensor):
        return output.split(batch)
    if isinstance(output, list):
        return [output[index * batch : (index + 1) * batch] for index in range(count)]
    return [output] * count


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


def _seconds(calls: Sequence[Call], count: int) -> float | None:
    """Seconds of one forward of ``count`` such calls; None when that fails.

    The first is not counted. Of a forward so short that its launch counts, the next ones are what a CUDA graph is made
    of, so several are computed and the last two taken: a forward that is bound by the host would make any joining pay
    off. Of a long one two are enough that are alike, so that neither was held up by anything.
    """
    samples: list[float] = []
    call = calls[0]
    try:
        device, merged = next(leaf.device for leaf in call.leaves if isinstance(leaf, Tensor)), Merged()
        for _ in range(SETTLED):
            _wait(device)
            begun = time.perf_counter()
            _joined([calls[index % len(calls)] for index in range(count)], merged)
            _wait(device)
            samples.append(time.perf_counter() - begun)
            last = samples[1:][-2:]
            if sum(samples[1:]) > _SHORT and len(last) == 2 and max(last) <= _LIKE * min(last):
                break
    except Exception as error:
        log.info("batching: a forward of %d requests cannot be measured: %s: %s", count, type(error).__name__, error)
        if is_out_of_memory(error):
            free_memory(error)
        return None
    return min(samples[-2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _power_of_two(count: int) -> int:
    """The largest power of two that is not above ``count``: few batch sizes, few compiled graphs."""
    return 1 << (count.bit_length() - 1)


def _shapes(call: Call) -> str:
    return ", ".join("x".join(map(str, leaf.shape)) for leaf in call.leaves if isinstance(leaf, Tensor) and leaf.ndim)
