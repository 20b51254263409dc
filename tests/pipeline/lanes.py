"""Lanes in host memory: one that copies as late as it may, so that a buffer that is used again too early is seen, and
CUDA as far as one loads through it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from triptych.pipeline.staging import Arrival


class LateLane:
    """Copies only when somebody waits for it: what was overwritten until then arrives overwritten."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.locked: set[int] = set()
        self.sent = 0
        self.sent_bytes = 0
        self._fails_at = fails_at
        self._lock = threading.Lock()

    def lock(self, memory: Tensor) -> None:
        self.locked.add(memory.data_ptr())

    def unlock(self, memory: Tensor) -> None:
        self.locked.remove(memory.data_ptr())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype).fill_(77)

    def send(self, source: Tensor, target: Tensor) -> Arrival:
        with self._lock:
            self.sent += 1
            self.sent_bytes += source.nbytes
            if self.sent == self._fails_at:
                raise RuntimeError("the bus is gone")
        done = False
        lock = threading.Lock()

        def arrive() -> None:
            nonlocal done
            with lock:
                if not done:
                    target.copy_(source)
                done = True

        return arrive


class Cuda:
    """Stands in for `torch.cuda` of a machine with several GPUs, and knows which of them were opened.

    Any call opens the GPU that its thread is at, as the driver does, and the end of a stream's context goes back
    to the one before.
    """

    OURS = torch.device("cpu")
    """The GPU that has the weights: memory of the host is all there is to copy to."""

    def __init__(self) -> None:
        self.opened: set[Any] = set()
        self._thread = threading.local()

    def called(self, *args: Any, **kwargs: Any) -> None:
        """Whatever opens a GPU."""
        self.opened.add(getattr(self._thread, "at", "the first GPU"))

    @contextmanager
    def device(self, device: torch.device) -> Generator[None]:
        """Goes back without opening anything, as torch does."""
        before = getattr(self._thread, "at", "the first GPU")
        self._thread.at = device
        yield
        self._thread.at = before

    @contextmanager
    def stream(self, stream: Any) -> Generator[None]:
        with self.device(stream.device):
            yield
        self.called()

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(device=device)

    def event(self, *, blocking: bool) -> Any:
        return SimpleNamespace(record=self.called, synchronize=self.called)
