"""Tokens of one forward shared by several ranks: Ulysses and ring attention by Diffusers' context-parallel plans.

Diffusers applies one such configuration to a model for good. Here a model changes between configurations, and none,
from forward to forward: its hooks are Diffusers' own, asking for the present configuration first. Where the tokens do
not divide by the ranks, these have windows of them that overlap (`windows`), and attention looks at each once
(`exchange`).
"""

# Diffusers has no public names for the parts of its context parallelism.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import (
    ContextParallelSplitHook,
    _get_submodule_by_name,
)
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.models._modeling_parallel import ContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from triptych.accel.parallel.degrees import Layout
from triptych.accel.parallel.exchange import Exchange, gathered
from triptych.accel.parallel.windows import once, window
from triptych.accel.tally import Tally

log = logging.getLogger(__name__)

_INCOMPLETE = ("LTX2VideoTransformer3DModel",)
"""Classes whose plan leaves something out: of LTX-2, the positions between picture and sound."""
_MOST_UNEVEN: Final = 256
"""So many kinds of forwards are warned of."""
_MASKED = ("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel")
"""Classes that always attend with masks that hide something, which cannot go around a ring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequences:
    """What tokens of a class attend to, in terms of the lengths that the first split of a forward sees."""

    own: tuple[int, ...]
    """Their own sequence: which of the lengths it has, in this order."""
    other: tuple[int, ...] = ()
    """The sequence of the other stream that they attend to, if that is split too."""

    def exchanged(self, lengths: Sequence[int], exchange: Exchange) -> bool:
        """Have attention look at each token once; whether it can tell the sequences apart by their windows."""
        own, other = ([lengths[index] for index in its] for its in (self.own, self.other))
        if other and own != other and sum(_sizes(own, exchange)) == sum(_sizes(other, exchange)):
            return False
        exchange.own = once(own, exchange.ranks, exchange.device)
        exchange.other = once(other, exchange.ranks, exchange.device)
        return True


def _sizes(lengths: Sequence[int], exchange: Exchange) -> list[int]:
    return [window(length, 0, exchange.ranks)[1] for length in lengths]


_SEQUENCES: Final[Mapping[str, _Sequences]] = {
    # The picture is split alone: the text is whole on every rank.
    "WanTransformer3DModel": _Sequences(own=(0,)),
    "ChronoEditTransformer3DModel": _Sequences(own=(0,)),
    "HeliosTransformer3DModel": _Sequences(own=(0,)),
    # Picture and text are split, in this order, and attend to each other in one sequence, where the text stands first.
    "FluxTransformer2DModel": _Sequences(own=(1, 0)),
    "Flux2Transformer2DModel": _Sequences(own=(1, 0)),
    "QwenImageTransformer2DModel": _Sequences(own=(1, 0)),
    # The picture attends to itself, and then to the text.
    "LTXVideoTransformer3DModel": _Sequences(own=(0,), other=(1,)),
}
"""By class. In all, the picture's length is the first one. Others have to divide."""


def ways_of(name: str, plan: object) -> tuple[Literal["ulysses", "ring"], ...]:
    """How the tokens of a transformer class can be shared that has that plan in Diffusers."""
    if not plan or name in _INCOMPLETE:
        return ()
    return ("ulysses",) if name in _MASKED else ("ulysses", "ring")


def context(mesh: DeviceMesh, layout: Layout, device: torch.device) -> Exchange:
    """Diffusers' configuration for a layout on the mesh that was made for it."""
    config = ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses, mesh=mesh)
    whole = Exchange(context_parallel_config=config)
    whole.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh["ring", "ulysses"])
    return whole


class TokenSharing:
    """A model whose tokens are shared as the present configuration says."""

    def __init__(self, model: nn.Module, tally: Tally | None = None) -> None:
        """``tally`` counts forwards that could not be shared."""
        self._tally = tally or Tally()
        self._uneven: set[tuple[int, ...]] = set()
        self._sequences = _SEQUENCES.get(type(model).__name__)
        self._processors = [
            processor
            for processor in (getattr(module, "processor", None) for module in model.modules())
            if hasattr(processor, "_parallel_config")
        ]
        self.now: Exchange | None = None
        """How the present forward's tokens are shared."""
        self.undecided = True
        """Whether no tokens of the present forward have been looked at yet."""
        self.length = 0
        """How many tokens the picture of the present forward has."""
        plan: Mapping[str, Any] = getattr(model, "_cp_plan", None) or {}
        splits: dict[nn.Module, _Split] = {}
        for path, entries in plan.items():
            for module in _modules(model, path):
                if isinstance(entries, dict):
                    hook = splits[module] = _Split(entries, self)
                else:
                    hook = _Gather(_listed(entries), self, splits.get(module))
                HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, f"tokens-{path}-{type(hook)}")

    @contextmanager
    def using(self, exchange: Exchange | None) -> Generator[None]:
        """One forward in that way."""
        self._set(exchange)
        self.undecided = True
        try:
            yield
        finally:
            self._set(None)
            if exchange is not None:
                exchange.own = exchange.other = None

    def decide(self, lengths: list[int]) -> None:
        """At the first split of a forward: whether tokens of these lengths can be shared, and what attention looks at.

        Where they do not divide, and it is not known which of them attend to which, every rank computes the whole
        forward.
        """
        exchange = self.now
        if exchange is None or not lengths:
            return
        self.undecided = False
        self.length = lengths[0]
        if not any(length % exchange.ranks for length in lengths):
            return
        if self._sequences is None or not self._sequences.exchanged(lengths, exchange):
            self._give_up(tuple(dict.fromkeys(lengths)), exchange.ranks)

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

    def _set(self, exchange: Exchange | None) -> None:
        if exchange is self.now:
            return
        self.now = exchange
        for processor in self._processors:
            setattr(processor, "_parallel_config", exchange)  # noqa: B010  # of whatever class it is


class _Split(ContextParallelSplitHook):
    """Takes this rank's window of a module's inputs or outputs."""

    def __init__(self, entries: dict[str | int, Any], sharing: TokenSharing) -> None:
        super().__init__(entries, None)  # pyright: ignore[reportArgumentType]  # what uses it is overridden
        self._entries = entries
        self._sharing = sharing
        self.length = 0
        """How many tokens it had the last time."""

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
        return (args, kwargs) if self._sharing.now is None else super().pre_forward(module, *args, **kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self._sharing.undecided:
            self._sharing.decide(list(self._output_lengths(output)))
        return output if self._sharing.now is None else super().post_forward(module, output)

    def _prepare_cp_input(self, x: torch.Tensor, cp_input: Any) -> torch.Tensor:
        exchange = self._sharing.now
        if exchange is None or cp_input.expected_dims not in (None, x.dim()):
            return x
        self.length = x.shape[cp_input.split_dim]
        start, size = window(self.length, dist.get_rank(exchange.everyone), exchange.ranks)
        return x.narrow(cp_input.split_dim, start, size)

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
    """Joins the windows of a module's output."""

    def __init__(self, entries: list[Any], sharing: TokenSharing, split: _Split | None) -> None:
        """``split`` took the windows, if that was the same module."""
        super().__init__()
        self._entries = entries
        self._sharing = sharing
        self._split = split

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        exchange = self._sharing.now
        if exchange is None:
            return output
        length = self._sharing.length if self._split is None else self._split.length
        parts = [output] if isinstance(output, torch.Tensor) else list(output)
        whole = [
            part if entry is None else _joined(part, entry.gather_dim, length, exchange)
            for part, entry in zip(parts, self._entries, strict=True)
        ]
        return whole[0] if isinstance(output, torch.Tensor) else tuple(whole)


def _joined(part: torch.Tensor, dim: int, length: int, exchange: Exchange) -> torch.Tensor:
    """All ``length`` tokens, of which the ranks have windows."""
    whole = gathered(part, dim, exchange.everyone)
    places = once([length], exchange.ranks, part.device)
    return whole if places is None else whole.index_select(dim, places)


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
