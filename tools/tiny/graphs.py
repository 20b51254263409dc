"""Replays a training step as a CUDA graph: its thousands of small kernels are bound by their launches otherwise."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, ...]]


class GraphedStep:
    """Calls `step(*batch)`; captures it once for each key, after which only the batch's numbers may change.

    The step may leave results in tensors that outlive it, such as gradients, and must not read the host.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]] = {}

    def __call__(self, key: Hashable, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if key not in self._captured:
            self._captured[key] = self._capture([x.clone() for x in batch])
        graph, inputs, outputs = self._captured[key]
        torch._foreach_copy_(inputs, list(batch))
        graph.replay()
        return tuple(x.clone() for x in outputs)  # the next graph writes over the memory they share

    def _capture(self, inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._captured.values()))[0].pool() if self._captured else None
        with torch.cuda.graph(graph, pool=pool):
            outputs = self._step(*inputs)
        return graph, inputs, outputs
