"""Tokens of one forward shared by several ranks: Ulysses and ring attention by Diffusers' context-parallel plans.

Diffusers applies one such configuration to a model for good. Here a model changes between configurations, and none,
from forward to forward: its hooks are Diffusers' own, asking for the present configuration first.
"""

# Diffusers has no public names for the parts of its context parallelism.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import (
    ContextParallelSplitHook,
    _get_submodule_by_name,
)
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.models import attention_dispatch as dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig, gather_size_by_comm
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from triptych.accel.parallel.degrees import Layout
from triptych.accel.tally import Tally

log = logging.getLogger(__name__)

_INCOMPLETE = ("LTX2VideoTransformer3DModel",)
"""Classes whose plan leaves something out: of LTX-2, the positions between picture and sound."""
_MOST_UNEVEN: Final = 256
"""So many kinds of forwards are warned of."""
_MASKED = ("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel")
"""Classes that always attend with masks that hide something, which cannot go around a ring."""


def ways_of(name: str, plan: object) -> tuple[Literal["ulysses", "ring"], ...]:
    """How the tokens of a transformer class can be shared that has that plan in Diffusers."""
    if not plan or name in _INCOMPLETE:
        return ()
    return ("ulysses",) if name in _MASKED else ("ulysses", "ring")


def put_masks_together() -> None:
    """Have attention under Ulysses see the mask of all keys, of this rank's heads where it has a row for each head.

    Diffusers itself joins the parts of a mask [batch, heads or 1, queries or 1, keys], but not where heads differ in
    it, and where parts differ in length it leaves what it pads them with between them.
    """
    for backend, function in dispatch._AttentionBackendRegistry._backends.items():
        if not hasattr(function, "has_whole_masks"):
            dispatch._AttentionBackendRegistry._backends[backend] = _with_whole_mask(function)


def _with_whole_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        parallel = kwargs.get("_parallel_config")
        config = None if parallel is None else parallel.context_parallel_config
        if attn_mask is not None and config is not None and config.ulysses_degree > 1:
            if _has_heads(attn_mask, query.shape[2]):
                own = attn_mask.chunk(config.ulysses_degree, dim=1)[config._ulysses_local_rank]
                attn_mask = own.contiguous()
            if config.ulysses_anything and attn_mask.shape[-1] == key.shape[1]:
                attn_mask = _joined(attn_mask, attn_mask.dim() - 1, config)
        return function(query, key, value, attn_mask, *args, **kwargs)

    setattr(attend, "has_whole_masks", True)  # noqa: B010  # a function's own attribute
    return attend


def _has_heads(mask: torch.Tensor, heads: int) -> bool:
    return mask.dim() == 4 and mask.shape[1] == heads


def context(mesh: DeviceMesh, layout: Layout, device: torch.device) -> ParallelConfig:
    """Diffusers' configuration for a layout on the mesh that was made for it."""
    config = ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses, mesh=mesh)
    whole = ParallelConfig(context_parallel_config=config)
    whole.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh["ring", "ulysses"])
    return whole


class TokenSharing:
    """A model whose tokens are shared as the present configuration says."""

    def __init__(self, model: nn.Module, tally: Tally | None = None) -> None:
        """``tally`` counts forwards that could not be shared."""
        self._tally = tally or Tally()
        self._uneven: set[tuple[int, ...]] = set()
        self._processors = [
            processor
            for processor in (getattr(module, "processor", None) for module in model.modules())
            if hasattr(processor, "_parallel_config")
        ]
        self._compiled = any(getattr(module, "_compiled_call_impl", None) for module in model.modules())
        self._now: ParallelConfig | None = None
        self.undecided = True
        """Whether no tokens of the present forward have been looked at yet."""
        plan: Mapping[str, Any] = getattr(model, "_cp_plan", None) or {}
        for path, entries in plan.items():
            for module in _modules(model, path):
                hook = _Split(entries, self) if isinstance(entries, dict) else _Gather(_listed(entries), self)
                HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, f"tokens-{path}-{type(hook)}")

    @contextmanager
    def using(self, config: ParallelConfig | None) -> Generator[None]:
        """One forward under ``config``."""
        self._set(config)
        self.undecided = True
        try:
            yield
        finally:
            self._set(None)

    @property
    def now(self) -> ContextParallelConfig | None:
        """How the present forward's tokens are shared."""
        return None if self._now is None else self._now.context_parallel_config

    def decide(self, lengths: list[int]) -> None:
        """At the first split of a forward: whether, and how, tokens of these lengths can be shared.

        Where they do not divide, Ulysses exchanges sizes as well, which cannot be compiled, and ring cannot be had:
        then every rank computes the whole forward.
        """
        config = self.now
        if config is None or not lengths:
            return
        self.undecided = False
        ranks = (config.ring_degree or 1) * (config.ulysses_degree or 1)
        uneven = any(length % ranks for length in lengths)
        config.ulysses_anything = uneven
        if uneven and (self._compiled or config.ring_degree != 1 or min(lengths) < ranks):
            self._give_up(tuple(dict.fromkeys(lengths)), ranks)

    def _give_up(self, lengths: tuple[int, ...], ranks: int) -> None:
        """Compute this forward whole; logged once for each kind, by the first rank."""
        self._set(None)
        self._tally.unshared_forwards += 1
        if dist.get_rank() == 0 and lengths not in self._uneven and len(self._uneven) < _MOST_UNEVEN:
            self._uneven.add(lengths)
            log.warning(
                "tokens of lengths %s do not divide by %d: each rank computes such forwards whole, which is as slow as "
                "one GPU; they count in triptych_unshared_forwards_total",
                ", ".join(map(str, lengths)),
                ranks,
            )

    def _set(self, config: ParallelConfig | None) -> None:
        if config is self._now:
            return
        self._now = config
        for processor in self._processors:
            setattr(processor, "_parallel_config", config)  # noqa: B010  # of whatever class it is


class _Split(ContextParallelSplitHook):
    """Takes this rank's part of a module's inputs or outputs."""

    def __init__(self, entries: dict[str | int, Any], sharing: TokenSharing) -> None:
        super().__init__(entries, None)  # pyright: ignore[reportArgumentType]  # set before each use
        self._entries = entries
        self._sharing = sharing

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        module = super().initialize_hook(module)
        # Looked up now, because a compiler that traces the hook could not.
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        assert self.module_forward_metadata is not None
        self.module_forward_metadata.cached_parameter_indices = {name: index for index, name in enumerate(names)}
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._sharing.undecided:
            self._sharing.decide(list(self._input_lengths(args, kwargs)))
        self.parallel_config = self._sharing.now
        return (args, kwargs) if self.parallel_config is None else super().pre_forward(module, *args, **kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self._sharing.undecided:
            self._sharing.decide(list(self._output_lengths(output)))
        self.parallel_config = self._sharing.now
        return output if self.parallel_config is None else super().post_forward(module, output)

    def _input_lengths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        assert self.module_forward_metadata is not None
        for name, entry in self._entries.items():
            if not isinstance(name, str):
                continue
            value, _, _ = self.module_forward_metadata._get_parameter_from_args_kwargs(name, args, kwargs)
            yield from _lengths(value, entry)

    def _output_lengths(self, output: Any) -> Iterator[int]:
        outputs = [output] if isinstance(output, torch.Tensor) else output
        for index, entry in self._entries.items():
            if not isinstance(index, str) and index < len(outputs):
                yield from _lengths(outputs[index], entry)


class _Gather(ModelHook):
    """Joins the parts of a module's output."""

    def __init__(self, entries: list[Any], sharing: TokenSharing) -> None:
        super().__init__()
        self._entries = entries
        self._sharing = sharing

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        config = self._sharing.now
        if config is None:
            return output
        parts = [output] if isinstance(output, torch.Tensor) else list(output)
        whole = [
            part if entry is None else _joined(part, entry.gather_dim, config)
            for part, entry in zip(parts, self._entries, strict=True)
        ]
        return whole[0] if isinstance(output, torch.Tensor) else tuple(whole)


def _joined(part: torch.Tensor, dim: int, config: ContextParallelConfig) -> torch.Tensor:
    """All ranks' parts one after the other. Parts of different lengths are padded on their way, as gloo needs it."""
    assert config._flattened_mesh is not None
    group = config._flattened_mesh.get_group()
    length = part.shape[dim]
    lengths = gather_size_by_comm(length, group) if config.ulysses_anything else [length] * dist.get_world_size(group)
    padding = part.new_zeros([max(lengths) - length if d == dim else n for d, n in enumerate(part.shape)])
    padded = torch.cat((part, padding), dim) if padding.numel() else part.contiguous()
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([one.narrow(dim, 0, n) for one, n in zip(parts, lengths, strict=True)], dim)


def _lengths(value: Any, entry: Any) -> Iterator[int]:
    """The lengths along which a tensor, or each of several, would be split."""
    if isinstance(entry, list | tuple):
        for item, its in zip(value or (), entry, strict=False):
            yield from _lengths(item, its)
    elif isinstance(value, torch.Tensor) and entry.expected_dims in (None, value.dim()):
        yield value.shape[entry.split_dim]


def _modules(model: nn.Module, path: str) -> list[nn.Module]:
    blocks, number, _ = (*path.split(".", 2), "", "")[:3]
    if number.isdigit() and int(number) >= len(getattr(model, blocks)):
        return []  # Helios' plan has a line for each block of its one size
    found = _get_submodule_by_name(model, path)
    return found if isinstance(found, list) else [found]


def _listed(entries: Any) -> list[Any]:
    return list(entries) if isinstance(entries, list | tuple) else [entries]
