"""CUDA graphs of whole forwards, for shapes so small that the host cannot launch kernels as fast as the GPU runs them.

A forward is recorded once for each kind of call and then replayed as one launch. Whether that helps is measured on the
first calls of a kind: a forward that the host has launched long before the GPU is done is left alone, and of the others
those are replayed that a recording makes faster. Replaying runs the same kernels, so the bytes are the same. To record
takes as long as about ten forwards, so of kinds that may not come again those are recorded that came often.

A forward that waits for the GPU cannot be recorded, and to try leaves torch in a state that others suffer from. So that
is looked for before. Forwards in which GPUs exchange tensors are left alone (`launched_one_by_one`): each process
would decide by its own clock, and a recording needs all of them.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from triptych.accel.batching import Call, call_of
from triptych.accel.recordable import is_alone, is_early
from triptych.accel.remembered import forget, remembered
from triptych.accel.shortage import drop_when_short
from triptych.accel.sizes import Sizes

log = logging.getLogger(__name__)

_HELD_UP: Final = 0.7
"""Of the time that a forward takes: if launching it takes more, the GPU waits for the host."""
_LONG: Final = 0.15
"""Seconds that no forward takes to launch, but one that fills the GPU's queue; its memory is too much to record."""
_LOOKS: Final = 3
"""How often a forward is timed before it is left alone. A single call can be slow for many reasons."""
_OFTEN: Final = 20
"""Calls of a kind after which it is recorded where there are many kinds: one that comes no more has then cost half as
much again."""
_GAIN: Final = 0.9
"""A recording is kept when it takes less than this share of the forward's time."""
_LEFT_ALONE: Final = "no CUDA graph: a forward takes %.2f ms, the host has launched it after %.2f ms"
_MOST: Final = 8
"""Recordings kept; each holds the memory of one forward."""
_WAITS: Final = "called a synchronizing CUDA operation"
"""How torch warns of a call that waits for the GPU."""
_MENDED: Final = "2.12"
"""The first torch that cleans up behind a recording that fails."""
_MOST_KINDS: Final = 64
"""Kinds of calls that are remembered. There is no end of them where a model is given what changes every time."""


@dataclass(kw_only=True, slots=True)
class _Recording:
    """A recorded forward with its own inputs and outputs, and all else that it reads and the model may let go."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    outputs: list[Any]
    spec: Any
    held: list[Tensor]

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
    """Recordings of one model's forwards. Used from one thread, but for `drop`.

    Of ``sizes`` that were rehearsed more forwards are sure to come; others are waited for.
    """

    sizes: Sizes
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
            if not is_alone() or not _recordable(call.leaves):
                return compute(*args, **kwargs)
            kinds = self._kinds  # dropped, it is replaced by another
            kind = kinds.setdefault(call.key, _Kind())
            kinds.move_to_end(call.key)
            while len(kinds) > _MOST_KINDS:
                kinds.popitem(last=False)
            if not kind.settled:
                return self._look(kind, model, compute, call)
            if kind.recording is None:
                return compute(*args, **kwargs)
            return kind.recording.replay(call.leaves)

        model.forward = forward

    @property
    def recordings(self) -> int:
        """How many kinds of calls are replayed."""
        return sum(kind.recording is not None for kind in self._kinds.values())

    def _look(self, kind: _Kind, model: nn.Module, compute: Callable[..., Any], call: Call) -> Any:
        """One of the first calls of a kind: one may compile, some are timed, and what is held up is recorded."""
        args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)

        def run() -> Any:
            return compute(*args, **kwargs)

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
        if kind.calls < _OFTEN and not self.sizes.rehearsed and not is_early():
            return run()
        kind.settled = True
        kind.recording = _recorded(model, compute, call)
        self._forget_oldest()
        return run()

    def _forget_oldest(self) -> None:
        """What comes again after that is looked at anew."""
        kinds = self._kinds
        recorded = [key for key, kind in kinds.items() if kind.recording is not None]
        for key in recorded[: max(0, len(recorded) - _MOST)]:
            del kinds[key]


def _recorded(model: nn.Module, compute: Callable[..., Any], call: Call) -> _Recording | None:
    """A recording, if it is faster than what it records."""
    inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    args, kwargs = pytree.tree_unflatten(inputs, call.spec)
    forget(model)
    if _waits(lambda: compute(*args, **kwargs)):
        log.info("no CUDA graph: something in the forward waits for the GPU")
        return None
    plain = _seconds(lambda: compute(*args, **kwargs))
    try:
        recording = _record(model, compute, inputs, call.spec)
    except RuntimeError as error:
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


def _record(model: nn.Module, compute: Callable[..., Any], inputs: list[Any], spec: Any) -> _Recording:
    args, kwargs = pytree.tree_unflatten(inputs, spec)
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        # Other threads copy tensors meanwhile, which is none of this recording's business.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            made = compute(*args, **kwargs)
    except BaseException:
        torch.cuda.set_stream(stream)  # torch leaves its own
        if _before(torch.__version__, _MENDED):
            _close(pool, stream.device)
        raise
    outputs, out_spec = pytree.tree_flatten(made)
    return _Recording(graph=graph, inputs=inputs, outputs=outputs, spec=out_spec, held=remembered(model))


def _close(pool: Any, device: torch.device) -> None:
    """Clean up behind a recording that failed: its memory is still being given out for it, so that none could be given
    back to the GPU any more, and random numbers wait for its end, which a recording of nothing brings about."""
    end: Callable[[int | None, Any], None] | None = getattr(torch._C, "_cuda_endAllocateToPool", None)
    with suppress(RuntimeError):
        if end is not None:
            end(device.index, pool)
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


def _before(version: str, other: str) -> bool:
    """Whether a version of torch, such as ``2.11.0+cu130``, is older than another one, of two numbers."""
    one, two = ([int(part) for part in text.split(".")[:2]] for text in (version, other))
    return one < two


def _waits(run: Callable[[], object]) -> bool:
    """Whether the host waits for the GPU in ``run``; what other threads wait for at the same time looks alike, so it is
    run again where it seems so."""
    return all(_seems_to_wait(run) for _ in range(3))


def _seems_to_wait(run: Callable[[], object]) -> bool:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return any(_WAITS in str(warning.message) for warning in heard)


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
