"""CUDA graphs that do not wait for more forwards of a kind, as of sizes that were rehearsed."""

from __future__ import annotations

from torch import nn

from triptych.accel.cuda_graphs import CudaGraphs
from triptych.accel.sizes import Sizes


def impatient(model: nn.Module) -> CudaGraphs:
    """Recordings of a model, all of whose forwards are of a size that was rehearsed."""
    sizes = Sizes()
    sizes.rehearsed = True
    graphs = CudaGraphs(sizes=sizes)
    graphs.install(model)
    return graphs
