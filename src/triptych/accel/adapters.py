"""LoRA adapters written into the weights of the layers that they change, so that these stay as plain as all others.

An adapter adds a product of two thin matrices to a layer. Beside the layer, as PEFT has it, that is two more products
in every forward, and kernels, compiled blocks and quantised layers that know plain layers only cannot be had. Written
into the weights it costs nothing but the writing, whenever a request of other adapters has its turn: memory of the
adapted layers is read and written once, a few hundredths of a second for 14 billion weights. What the weights were is
kept beside them, so that they are the same bytes again afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triptych.accel.quant import write_weight
from triptych.accel.shortage import Droppable

Choice = tuple[tuple[str, float], ...]
"""Adapters at work with their scales, in the order in which they add up."""

_made_of_weights: weakref.WeakSet[Droppable] = weakref.WeakSet()


def drop_when_adapted(kept: Droppable) -> None:
    """Have ``kept``, which was computed with weights, dropped whenever adapters change some."""
    _made_of_weights.add(kept)


class Unwritable(ValueError):
    """An adapter changes a layer in a way that cannot be written into its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What an adapter adds to a layer at scale 1: ``up @ down``, and ``bias`` to its bias."""

    up: Tensor
    """[out, rank], with alpha over rank in it."""
    down: Tensor
    """[rank, in], of convolutions [rank, in * kernel]."""
    bias: Tensor | None
    """[out]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A layer that adapters change."""

    layer: Any
    """A linear one or a convolution, which may be quantised later."""
    weight: Tensor
    """Its weights without any adapter."""
    bias: Tensor | None
    parts: Mapping[str, _Part]
    """By adapter."""

    def write(self, choice: Choice) -> None:
        """Give it the weights that it has with these adapters."""
        at_work = [(self.parts[name], scale) for name, scale in choice if name in self.parts]
        live: Tensor = self.layer.weight
        weight = self.weight.to(live.device)
        if at_work:
            scaled = [(part.up.to(live.device), part.down.to(live.device), scale) for part, scale in at_work]
            flat = weight.flatten(1)
            if len(scaled) == 1:
                up, down, scale = scaled[0]
                flat = torch.addmm(flat, up, down, alpha=scale)
            else:
                ups = torch.cat([(up.float() * scale).to(up.dtype) for up, _, scale in scaled], dim=1)
                flat = torch.addmm(flat, ups, torch.cat([down for _, down, _ in scaled]))
            weight = flat.view_as(weight)
        write_weight(self.layer, weight)
        if self.bias is not None:
            bias = self.bias.to(live.device, copy=True)
            for part, scale in at_work:
                if part.bias is not None:
                    bias.add_(part.bias.to(live.device), alpha=scale)
            self.layer.bias.data.copy_(bias)


class WrittenAdapters:
    """The adapters of one model, and its layers that any of them changes. Used from one thread."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = layers
        self._written: Choice | None = ()
        """None while it is not known."""

    @property
    def nbytes(self) -> int:
        """Memory of what is kept beside the model."""
        kept = [tensor for layer in self._layers for tensor in (layer.weight, layer.bias) if tensor is not None]
        return sum(tensor.nbytes for tensor in kept)

    def __len__(self) -> int:
        """How many layers are changed."""
        return len(self._layers)

    def choose(self, choice: Choice) -> None:
        """Have exactly these at work; names that the model does not know change nothing in it."""
        if choice == self._written:
            return
        before = self._written
        self._written = None  # should memory run out half way
        with torch.no_grad():
            for layer in self._layers:
                if before is None or _at_work(layer, before) != _at_work(layer, choice):
                    layer.write(choice)
        for kept in list(_made_of_weights):
            kept.drop()
        self._written = choice


def _at_work(layer: _Layer, choice: Choice) -> Choice:
    return tuple((name, scale) for name, scale in choice if name in layer.parts)


def write_into(model: nn.Module) -> WrittenAdapters:
    """Take PEFT's layers out of ``model``, which has its adapters in its weights from now on, at first none of them.

    The model still says by its ``peft_config`` that it is adapted. Raises `Unwritable` for a kind of adapter that is
    more than a product and a bias.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    layers = [_taken(name, module) for name, module in wrapped]  # all can be had before anything is changed
    for (name, _), layer in zip(wrapped, layers, strict=True):
        model.set_submodule(name, layer.layer)
    return WrittenAdapters(layers)


def _taken(name: str, wrapped: Any) -> _Layer:
    """A layer out of PEFT's around it."""
    layer: Any = wrapped.get_base_layer()
    if (why := _objection(wrapped, layer)) is not None:
        raise Unwritable(f"{name}: {why}")
    parts: dict[str, _Part] = {}
    for adapter in wrapped.lora_A:
        down, up = wrapped.lora_A[adapter].weight, wrapped.lora_B[adapter]
        scale = float(wrapped.scaling[adapter])
        parts[adapter] = _Part(
            up=(up.weight.detach().flatten(1).float() * scale).to(layer.weight.dtype),
            down=down.detach().flatten(1).to(layer.weight.dtype),
            bias=None if up.bias is None else up.bias.detach().to(layer.weight.dtype) * scale,
        )
    bias = layer.bias if any(part.bias is not None for part in parts.values()) else None
    return _Layer(
        layer=layer,
        weight=layer.weight.detach().clone(),
        bias=None if bias is None else bias.detach().clone(),
        parts=parts,
    )


def _objection(wrapped: Any, layer: Any) -> str | None:
    """Why what PEFT has put around ``layer`` cannot be written into its weights; None when it can."""
    from peft.tuners.lora import LoraLayer

    if not isinstance(wrapped, LoraLayer) or not isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return f"is a {type(layer).__name__}, adapted by {type(wrapped).__name__}"
    if not isinstance(layer, nn.Linear) and layer.groups > 1:
        return "is a convolution in groups"
    if wrapped.lora_variant:
        return f"is adapted by {', '.join(sorted(_kinds(wrapped)))}, which is more than a product of two matrices"
    ups: list[Any] = list(wrapped.lora_B.values())
    if layer.bias is None and any(up.bias is not None for up in ups):
        return "has no bias that the adapter's could be added to"
    return None


def _kinds(wrapped: Any) -> Iterator[str]:
    for variant in wrapped.lora_variant.values():
        yield type(variant).__name__
