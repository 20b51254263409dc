"""Threads that move tensors to and from the device, on a stream of their own beside the computation's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from triptych.worker.jobs import Post
from triptych.worker.threads import Job, WorkerThread


class CopyingThread(WorkerThread[Job]):
    """A `WorkerThread` whose copies run on its own stream; on the CPU there is none."""

    def __init__(self, name: str, post: Callable[[Post], None], device: str) -> None:
        super().__init__(name, post, device)
        self._wait_for_copies: Callable[[], None] = lambda: None
        """Returns when the copies that this thread began are done."""

    def work(self) -> None:
        """Jobs one after the other, all on this thread's stream."""
        torch.set_grad_enabled(False)
        if self._device.type != "cuda":
            super().work()
            return
        stream = torch.cuda.Stream(self._device)
        self._wait_for_copies = stream.synchronize
        with torch.cuda.stream(stream):
            super().work()
