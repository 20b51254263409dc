"""When memory runs out: how that is told from other errors, and how what filled it is let go."""

from __future__ import annotations

import gc
import traceback

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has a type for it; torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def free_memory(error: BaseException) -> None:
    """Let go of what filled the memory: the frames that ``error`` came through hold it."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
