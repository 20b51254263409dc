"""Weights of one transformer spread over several ranks: columns of one product, rows of the next, one sum after both.

Diffusers has plans of its own for a few models; this one is for Wan's transformers, whose attention normalises queries
and keys over all heads, so that ranks also exchange one number a token for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

PLANNED = ("WanTransformer3DModel",)
"""Classes that `shard` knows."""


class ShardedRMSNorm(nn.Module):
    """RMSNorm over features of which each rank has a part: [..., features / ranks]; the mean is of all."""

    def __init__(self, whole: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__()
        self._features = whole.normalized_shape[-1]
        self._group = mesh.get_group()
        self._eps = torch.finfo(torch.float32).eps if whole.eps is None else whole.eps
        part = whole.weight.detach().chunk(mesh.size())[mesh.get_local_rank()]
        self.weight = nn.Parameter(part.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=self._group)
        return (wide * torch.rsqrt(squares / self._features + self._eps)).type_as(x) * self.weight


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the weights of every block. ``mesh`` has one dimension, whose size divides the heads."""
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            _shard_attention(attention, mesh)
        parallelise(block.ffn, mesh, {"net.0.proj": ColwiseParallel(), "net.2": RowwiseParallel()})


def _shard_attention(attention: Any, mesh: DeviceMesh) -> None:
    columns = ["to_q", "to_k", "to_v"]
    norms = ["norm_q", "norm_k"]
    if attention.add_k_proj is not None:
        columns += ["add_k_proj", "add_v_proj"]
        norms.append("norm_added_k")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    parallelise(attention, mesh, plan | {"to_out.0": RowwiseParallel()})
    for name in norms:
        setattr(attention, name, ShardedRMSNorm(getattr(attention, name), mesh))
    attention.heads //= mesh.size()
    attention.inner_dim //= mesh.size()
    attention.kv_inner_dim //= mesh.size()


def parallelise(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Spread the linear layers of ``module`` that ``plan`` names."""
    # Every rank has read the same weights, so none has to be sent them.
    parallelize_module(module, mesh, dict(plan), src_data_rank=None)
