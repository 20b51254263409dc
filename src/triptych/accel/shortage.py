"""When memory runs out: how that is told from other errors, and how what filled it is let go."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Protocol

import torch


class Droppable(Protocol):
    """Something kept only because there was room for it."""

    def drop(self) -> None:
        """Let go of it, in whatever thread."""
        ...


_WORDS = (
    "DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED",
)  # fmt: skip
"""How torch's CPU allocator, the CUDA driver and its libraries say that they got no memory."""

_droppable: weakref.WeakSet[Droppable] = weakref.WeakSet()


def drop_when_short(kept: Droppable) -> None:
    """Have ``kept`` dropped, as long as it lives, whenever memory has run out."""
    _droppable.add(kept)


def is_out_of_memory(error: BaseException) -> bool:
    """Torch has a type for its own allocator on CUDA; all others tell by the words of a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
    )


def free_memory(error: BaseException) -> None:
    """Let go of what filled the memory: the frames that ``error`` came through hold it, and what need not be kept."""
    for kept in list(_droppable):
        kept.drop()
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
