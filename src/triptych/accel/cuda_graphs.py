"""CUDA graphs of whole forwards, for shapes so small that the host cannot launch kernels as fast as the GPU runs them.

A forward is recorded once for each kind of call and then replayed as one launch. Whether that helps is measured on the
first calls of a kind: a forward that the host has launched long before the GPU is done is left alone, and of the others
those are replayed that a recording makes faster. Replaying runs the same kernels, so the bytes are the same.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from triptych.accel.batching import Call, call_of
from triptych.accel.shortage import drop_when_short

log = logging.getLogger(__name__)

_HELD_UP: Final = 0.7
"""Of the time that a forward takes: if launching it takes more, the GPU waits for the host."""
_LONG: Final = 0.15
"""Seconds that no forward takes to launch, but one that fills the GPU's queue; its memory is too much to record."""
_LOOKS: Final = 3
"""How often a forward is timed before it is left alone. A single call can be slow for many reasons."""
_GAIN: Final = 0.9
"""A recording is kept when it takes less than this share of the forward's time."""
_LEFT_ALONE: Final = "no CUDA graph: a forward takes %.2f ms, the host has launched it after %.2f ms"
_MOST: Final = 8
"""Recordings kept; each holds the memory of one forward."""
_MOST_KINDS: Final = 64
"""Kinds of calls that are remembered. There is no end of them where a model is given what changes every time."""


@dataclass(kw_only=True, slots=True)
class _Recording:
    """A recorded forward with its own inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    outputs: list[Any]
    spec: Any

    def replay(self, leaves: list[Any]) -> Any:
        for mine, given in zip(self.inputs, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self.graph.replay()
        copies = [out.clone() if isinstance(out, Tensor) else out for out in self.outputs]
        return pytree.tree_unflatten(copies, self.spec)


@dataclass(kw_only=True, slots=True)
class _Kind:
    """Calls of equal shapes: how many were seen, and what came of looking at them."""

    calls: int = 0
    held_up: bool = False
    """Whether the GPU was seen to wait for the host."""
    settled: bool = False
    recording: _Recording | None = None


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class CudaGraphs:
    """Recordings of one model's forwards. Used from one thread, but for `drop`."""

    _kinds: OrderedDict[Hashable, _Kind] = field(default_factory=OrderedDict[Hashable, _Kind])

    def __post_init__(self) -> None:
        drop_when_short(self)

    def drop(self) -> None:
        """Let go of all recordings; what comes again after that is looked at anew."""
        self._kinds = OrderedDict()

    def install(self, model: nn.Module) -> None:
        """Have the forwards of ``model`` go through this."""
        compute: Callable[..., Any] = model.forward

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = call_of(compute, args, kwargs)
            if not _recordable(call.leaves):
                return compute(*args, **kwargs)
            kinds = self._kinds  # dropped, it is replaced by another
            kind = kinds.setdefault(call.key, _Kind())
            kinds.move_to_end(call.key)
            while len(kinds) > _MOST_KINDS:
                kinds.popitem(last=False)
            if not kind.settled:
                return self._look(kind, lambda: compute(*args, **kwargs), compute, call)
            if kind.recording is None:
                return compute(*args, **kwargs)
            return kind.recording.replay(call.leaves)

        model.forward = forward

    @property
    def recordings(self) -> int:
        """How many kinds of calls are replayed."""
        return sum(kind.recording is not None for kind in self._kinds.values())

    def _look(self, kind: _Kind, run: Callable[[], Any], compute: Callable[..., Any], call: Call) -> Any:
        """One of the first calls of a kind: one may compile, some are timed, and what is held up is recorded."""
        kind.calls += 1
        if kind.calls == 1:
            return run()
        if not kind.held_up:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            result = run()
            launched = time.perf_counter() - begun
            torch.cuda.synchronize()
            took = time.perf_counter() - begun
            kind.held_up = took < _LONG and launched > _HELD_UP * took
            kind.settled = not kind.held_up and kind.calls > _LOOKS
            if kind.settled:
                log.info(_LEFT_ALONE, took * 1e3, launched * 1e3)
            return result
        kind.settled = True
        kind.recording = _recorded(compute, call)
        self._forget_oldest()
        return run()

    def _forget_oldest(self) -> None:
        """What comes again after that is looked at anew."""
        kinds = self._kinds
        recorded = [key for key, kind in kinds.items() if kind.recording is not None]
        for key in recorded[: max(0, len(recorded) - _MOST)]:
            del kinds[key]


def _recorded(compute: Callable[..., Any], call: Call) -> _Recording | None:
    """A recording, if it is faster than what it records."""
    inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    args, kwargs = pytree.tree_unflatten(inputs, call.spec)
    plain = _seconds(lambda: compute(*args, **kwargs))
    try:
        recording = _record(compute, inputs, call.spec)
    except RuntimeError as error:  # something in the forward waits for the GPU or reads from it
        log.info("no CUDA graph: %s", str(error).splitlines()[0])
        return None
    replayed = _seconds(lambda: recording.replay(call.leaves))
    kept = replayed < _GAIN * plain
    log.info("CUDA graph %s: %.2f ms, launched one by one %.2f ms", _WORD[kept], replayed * 1e3, plain * 1e3)
    return recording if kept else None


def _recordable(leaves: list[Any]) -> bool:
    """Whether a call's arguments are tensors on the GPU and plain values, and nothing else."""
    return all(
        leaf.is_cuda if isinstance(leaf, Tensor) else isinstance(leaf, bool | int | float | str | None | list)
        for leaf in leaves
    ) and not any(isinstance(part, Tensor) for part in pytree.tree_leaves([x for x in leaves if isinstance(x, list)]))


_WORD: Final = {True: "kept", False: "dropped"}


def _record(compute: Callable[..., Any], inputs: list[Any], spec: Any) -> _Recording:
    args, kwargs = pytree.tree_unflatten(inputs, spec)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Other threads copy tensors meanwhile, which is none of this recording's business.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = compute(*args, **kwargs)
    outputs, out_spec = pytree.tree_flatten(made)
    return _Recording(graph=graph, inputs=inputs, outputs=outputs, spec=out_spec)


def _seconds(run: Callable[[], object]) -> float:
    """The shortest of three runs."""
    samples: list[float] = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - begun)
    return min(samples)
