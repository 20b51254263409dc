"""A lane in host memory that copies as late as it may, so that a buffer that is used again too early is seen."""

from __future__ import annotations

import threading

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
