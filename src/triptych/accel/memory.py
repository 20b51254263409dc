"""Fits models into a small GPU: weights that wait in host memory, and VAEs that work on one piece at a time.

Offloading is exact. ``block`` and ``layer`` are Diffusers' group offloading, with the next group on its way on a stream
of its own while the present one computes. A Transformers model keeps its blocks too deep for Diffusers to group them,
so it goes layer by layer in both. A VAE is called by ``encode`` and ``decode``, past the forward that groups wait for;
it is small, and moves as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

from triptych.accel.plan import Technique
from triptych.config import Offload
from triptych.errors import ConfigError


def offload(
    modules: Mapping[str, nn.Module], kinds: Mapping[str, Offload], device: torch.device
) -> tuple[Technique, ...]:
    """Let the models that ``kinds`` names live in host memory and be on ``device`` while they compute.

    Their weights must be in host memory. To be called after everything that changes their layers. Models that move as a
    whole share the device: one that is called sends the others back.
    """
    whole: list[_AsAWhole] = []
    done: list[Technique] = []
    for name, kind in kinds.items():
        model = modules[name]
        if kind == "none":
            continue
        if kind == "model" or hasattr(model, "decode"):
            hook = _AsAWhole(model, device, whole)
            whole.append(hook)
            add_hook_to_module(model, hook)
        else:
            _in_groups(model, kind, device)
        done.append(Technique(name=f"{name}: offload", on=True, why=f"by {kind}", exact=True))
    return tuple(done)


def _in_groups(model: nn.Module, kind: Offload, device: torch.device) -> None:
    from diffusers.hooks.group_offloading import apply_group_offloading

    blocks = kind == "block" and type(model).__module__.startswith("diffusers.")
    apply_group_offloading(
        model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level" if blocks else "leaf_level",
        num_blocks_per_group=1 if blocks else None,
        use_stream=device.type == "cuda",
    )


class _AsAWhole(ModelHook):
    """Brings one model to the device before it computes, and sends back whichever is there.

    What is in host memory stays there: going back is letting go of what is on the device, unless that was changed.
    """

    def __init__(self, model: nn.Module, device: torch.device, others: list[_AsAWhole]) -> None:
        self.execution_device = device
        self._model = model
        self._others = others
        self._brought: list[_Brought] = []

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called by accelerate before ``forward``, and by Diffusers before ``encode`` and ``decode`` of a VAE."""
        for other in self._others:
            if other is not self:
                other.leave()
        if not self._brought:
            device, tensors = self.execution_device, [*self._model.parameters(), *self._model.buffers()]
            self._brought = [_Brought(tensor, device) for tensor in tensors if _can_be_brought(tensor, device)]
        self._model.to(self.execution_device)  # whatever is not there yet
        return args, kwargs

    def leave(self) -> None:
        """Send the model to host memory, if it is not there."""
        for brought in self._brought:
            brought.leave()
        self._brought.clear()
        self._model.to("cpu")


class _Brought:
    """A weight on the device, and the same in host memory."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor = tensor
        self._host = tensor.data
        tensor.data = self._host.to(device)
        self._there = tensor.data
        self._version = tensor._version

    def leave(self) -> None:
        """Back to host memory, without a copy if nobody has changed it."""
        if self._tensor.data_ptr() == self._there.data_ptr() and self._tensor._version == self._version:
            self._tensor.data = self._host


def _can_be_brought(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is numbers and nothing else, in host memory and wanted elsewhere; quantised ones are several."""
    return type(tensor.data) is Tensor and tensor.device.type == "cpu" and tensor.device != device


def divide(modules: Mapping[str, nn.Module], *, tiling: bool, slicing: bool) -> tuple[Technique, ...]:
    """Let the VAEs among ``modules`` work in tiles, or on one item of a batch at a time.

    Raises `ConfigError` when a VAE cannot.
    """
    done: list[Technique] = []
    for name, model in modules.items():
        if not hasattr(model, "decode"):
            continue
        vae: Any = model
        for wanted, word, what in ((tiling, "tiling", "overlapping tiles"), (slicing, "slicing", "one item at a time")):
            if not wanted:
                continue
            if not hasattr(vae, f"use_{word}"):
                raise ConfigError(f"vae-{word}: {type(vae).__name__} cannot do it")
            getattr(vae, f"enable_{word}")()
            done.append(Technique(name=f"{name}: {word}", on=True, why=what))
    return tuple(done)
