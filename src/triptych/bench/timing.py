"""What one call takes on a GPU: waited for, until all of it is launched, and queued behind others of its kind."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypedDict

import torch

from triptych.accel.batching import SETTLED
from triptych.accel.recordable import recorded_early

_ENOUGH: Final = 5.0
"""Seconds of counted calls after which three are enough: long ones vary little."""
_SHORT: Final = 1.0
"""Seconds of calls that are not counted, after which they are too long for a CUDA graph."""
_LOOKS: Final = 3
"""Calls after the first that may be looked at for what a CUDA graph would gain (`triptych.accel.cuda_graphs`)."""


def first_call(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The result of the first call and what it took."""
    start = time.perf_counter()
    output = call()
    torch.cuda.synchronize()
    return output, time.perf_counter() - start


class _Figures(TypedDict):
    """The fields of a `Row` that a measurement gives."""

    seconds: float
    ratio: float
    launched: float
    queued: float
    queued_ratio: float
    peak_gib: float


@dataclass(frozen=True, slots=True)
class Times:
    """Medians of one call in seconds, as in `Row`."""

    waited: float
    launched: float
    queued: float
    peak_gib: float

    def against(self, stock: Times) -> _Figures:
        """The figures of a row."""
        return {
            "seconds": self.waited,
            "ratio": stock.waited / self.waited,
            "launched": self.launched,
            "queued": self.queued,
            "queued_ratio": stock.queued / self.queued,
            "peak_gib": self.peak_gib,
        }


def measure(call: Callable[[], object], repeats: int, *, settles: bool = False) -> Times:
    """A call up to ``repeats`` times in each way, and its peak of GPU memory, after the first one.

    One that ``settles`` is measured once a CUDA graph of it is there, or it is settled that there will be none; of any
    other one more is not counted.
    """
    spent = 0.0
    with recorded_early():
        for number in range(SETTLED - 1 if settles else 1):
            if number >= _LOOKS and spent > _SHORT:
                break
            spent += _waited(call)[1]
    torch.cuda.reset_peak_memory_stats()
    waited: list[float] = []
    launched: list[float] = []
    while len(waited) < repeats and (len(waited) < 3 or sum(waited) < _ENOUGH):
        for samples, seconds in zip((launched, waited), _waited(call), strict=True):
            samples.append(seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(waited) + 1)]
    call()  # gives the host its lead
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    queued = [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]
    peak = torch.cuda.max_memory_allocated() / (1 << 30)
    return Times(statistics.median(waited), statistics.median(launched), statistics.median(queued), peak)


def _waited(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds until a call had given the GPU all its work, and until that was done."""
    start = time.perf_counter()
    call()
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    return launched, time.perf_counter() - start
