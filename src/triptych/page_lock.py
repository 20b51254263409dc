"""Host memory that a GPU reads and writes by itself, at the speed of the bus."""

from __future__ import annotations

import contextlib

import torch


def page_lock(memory: torch.Tensor, gpu: torch.device) -> int:
    """Page-lock memory of the host for a GPU; CUDA's error, 0 for none. What cannot be locked is used as it is, which
    is right and slower.

    The first call of CUDA in a thread opens the GPU that the thread is at, which takes memory there: so it is at ours.
    """
    with torch.cuda.device(gpu):
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[union-attr]
    if status != 0:
        with contextlib.suppress(RuntimeError):  # CUDA has the next kernel report that error, whatever it does
            torch.zeros(1, device=gpu)
    return status


def page_unlock(memory: torch.Tensor, gpu: torch.device) -> None:
    """Give what was locked back to the system's paging."""
    with torch.cuda.device(gpu):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[union-attr]
