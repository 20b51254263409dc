"""Attention among ranks that share the tokens, where Diffusers' own exchange does not do.

Diffusers exchanges equal parts, of which all tokens count. Where ranks have windows that overlap (`windows`), what is
put around each of its backends here makes the exchange itself and has the backend attend as if it were alone: with this
rank's heads under Ulysses, with this rank's queries in a ring, and over keys of which each is there once.
"""

# Diffusers has no public names for the parts of its context parallelism.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch as dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import Tensor

from triptych.errors import StageError


@dataclass
class Exchange(ParallelConfig):
    """Diffusers' configuration, which attention is told of, and which keys of the present forward to look at.

    Tensors, of which a compiled block only knows that they have some length; numbers would be part of its graph.
    """

    own: Tensor | None = None
    """Places among all ranks' keys at which each stands once, where tokens attend to their own sequence; None: all."""
    other: Tensor | None = None
    """The same where they attend to a sequence that is not theirs."""

    @property
    def context(self) -> ContextParallelConfig:
        """Diffusers' own part."""
        assert self.context_parallel_config is not None
        return self.context_parallel_config

    @property
    def ring(self) -> int:
        """Ranks that each attend with queries of their own."""
        return self.context.ring_degree or 1

    @property
    def ulysses(self) -> int:
        """Ranks that each attend with heads of their own."""
        return self.context.ulysses_degree or 1

    @property
    def ranks(self) -> int:
        """Ranks that share the tokens."""
        return self.ring * self.ulysses

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        assert self._device is not None
        return self._device

    @property
    def everyone(self) -> dist.ProcessGroup:
        """All that share the tokens, in the order of their parts."""
        assert self.context._flattened_mesh is not None
        return self.context._flattened_mesh.get_group()

    def of_own_heads(self, mask: Tensor, heads: int) -> Tensor:
        """This rank's part of a mask [batch, heads or 1, queries or 1, keys] that has a row for each head."""
        if self.ulysses == 1 or mask.dim() != 4 or mask.shape[1] != heads:
            return mask
        return mask.chunk(self.ulysses, dim=1)[self.context._ulysses_local_rank].contiguous()

    def by_heads(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads, width] of this rank's tokens to those of more tokens and this rank's heads."""
        return x if self.ulysses == 1 else dispatch._all_to_all_dim_exchange(x, 2, 1, self._ulysses)

    def by_tokens(self, x: Tensor) -> Tensor:
        """Back again."""
        return x if self.ulysses == 1 else dispatch._all_to_all_dim_exchange(x, 1, 2, self._ulysses)

    def around(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads, width] of all ranks of the ring."""
        if self.ring == 1:
            return x
        assert self.context._ring_mesh is not None
        return gathered(x, 1, self.context._ring_mesh.get_group())

    @property
    def _ulysses(self) -> dist.ProcessGroup:
        assert self.context._ulysses_mesh is not None
        return self.context._ulysses_mesh.get_group()


def install() -> None:
    """Put this around the functions of Diffusers' registry, those that it has by now; others can be added later."""
    for backend, function in dispatch._AttentionBackendRegistry._backends.items():
        if not hasattr(function, "exchanges"):
            dispatch._AttentionBackendRegistry._backends[backend] = _exchanging(function)


def _exchanging(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **settings: Any) -> Any:
        exchange = settings.get("_parallel_config")
        if not isinstance(exchange, Exchange):
            return function(query, key, value, attn_mask=attn_mask, **settings)
        if attn_mask is not None:
            attn_mask = exchange.of_own_heads(attn_mask, query.shape[2])
        once = exchange.own if key.shape[1] == query.shape[1] else exchange.other
        if once is None:
            return function(query, key, value, attn_mask=attn_mask, **settings)
        if settings.get("is_causal"):
            raise StageError("GPUs cannot share tokens that see only those before them")
        if attn_mask is not None and attn_mask.shape[-1] == key.shape[1]:
            attn_mask = gathered(attn_mask, -1, exchange.everyone).index_select(-1, once)
        query, key, value = (exchange.by_heads(x) for x in (query, key, value))
        key, value = (exchange.around(x).index_select(1, once) for x in (key, value))
        out = function(query, key, value, attn_mask=attn_mask, **settings | {"_parallel_config": None})
        return exchange.by_tokens(out)

    setattr(attend, "exchanges", True)  # noqa: B010  # a function's own attribute
    return attend


def gathered(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, which are of one shape, one after the other."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)
