"""Weights of a T5 text encoder spread over several ranks: each has a part of the heads and of the wide layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from triptych.accel.parallel.tensor import parallelise

PLANNED = ("T5EncoderModel", "UMT5EncoderModel")
"""Classes that `shard_text` knows."""


def shard_text(model: Any, mesh: DeviceMesh) -> None:
    """Keep this rank's part of every block. ``mesh`` has one dimension, whose size divides the heads."""
    for block in model.encoder.block:
        attention, wide = block.layer[0].SelfAttention, block.layer[-1].DenseReluDense
        parallelise(attention, mesh, {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()})
        attention.n_heads //= mesh.size()
        attention.inner_dim //= mesh.size()
        if attention.has_relative_attention_bias:
            attention.relative_attention_bias = _part(attention.relative_attention_bias, mesh)
        first = [name for name in ("wi", "wi_0", "wi_1") if hasattr(wide, name)]
        parallelise(wide, mesh, {name: ColwiseParallel() for name in first} | {"wo": RowwiseParallel()})


def _part(whole: nn.Embedding, mesh: DeviceMesh) -> nn.Embedding:
    """The columns of this rank's heads: [buckets, heads / ranks]."""
    columns = whole.weight.detach().chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()
    return nn.Embedding.from_pretrained(columns)
