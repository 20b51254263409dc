"""A stream beside the computation's, for what comes before the first step of a run while another one computes.

It neither waits for the step in flight nor delays it. What is made there is read by steps later, on the stream of the
computation: the allocator is told, and the computation waits for it on the GPU when it is about to be read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Beside:
    """The stream of one device. Used from one thread; on a CPU all of it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def entered(self, given: Iterable[Tensor] = ()) -> Generator[None]:
        """What runs within is put on this stream, which may read ``given``: tensors that are complete."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream, self._done = torch.cuda.Stream(self._device), torch.cuda.Event()
        assert self._done is not None
        computing = torch.cuda.current_stream(self._device)
        own(given, self._stream)
        made = Made("cuda")
        with torch.cuda.stream(self._stream), made:
            yield
        for tensor in made.tensors:
            tensor.record_stream(computing)
        self._done.record(self._stream)

    def join(self) -> None:
        """Have the computation wait, on the GPU, for all that was put here so far."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)


def own(tensors: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream reads tensors which another stream brought."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


class Made(TorchDispatchMode):
    """Holds all that is made on one kind of device, with what is gone again: its memory could be given to another."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [
            leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.device.type == self._device
        ]
        return result
