"""Diffusers' and Transformers' own loading, with weights that come to the device through a `Staging`.

Both libraries build a model without memory, give each of its tensors the one that the files have for it, and finish
the model. What name becomes which tensor, in which dtype, what is joined, split or tied, stays theirs: only the tensors
that they are given are others, already on the device when they are asked for, instead of in a mapped file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from triptych.pipeline.staging import OnTheWay, Staging
from triptych.pipeline.stored import Stored, stored_tensors


def from_pretrained(kind: Any, staging: Staging, folder: str, **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
    """``kind.from_pretrained(folder, ...)`` of a class of Diffusers or Transformers, with its loading info.

    Its device must be the staging's. Weights that are quantised in their files, or in a dtype that safetensors alone
    knows, come as they would without.
    """
    hook = _hook(kind)
    if hook is None:
        return kind.from_pretrained(folder, output_loading_info=True, **arguments)
    streamed: Any = type(kind.__name__, (hook, kind), {"__module__": kind.__module__, "_triptych_staging": staging})
    module, info = streamed.from_pretrained(folder, output_loading_info=True, **arguments)
    if type(module) is streamed:  # Diffusers gives some classes' models to others
        module.__class__ = kind
    return module, info


def _hook(kind: Any) -> type[Any] | None:
    """By the library that loads it, which need not be the one that has the class."""
    from diffusers.models.modeling_utils import ModelMixin
    from transformers import PreTrainedModel

    if issubclass(kind, ModelMixin):
        return _Diffusers
    return _Transformers if issubclass(kind, PreTrainedModel) else None


class _Diffusers:
    """What stands before a class of Diffusers while one of its models is loaded."""

    _triptych_staging: Staging

    @classmethod
    def _load_pretrained_model(
        cls, model: Any, state_dict: dict[str, Any] | None, files: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        """``state_dict`` are the mapped tensors of a single file under the names of today."""
        tensors = None if kwargs.get("hf_quantizer") is not None else stored_tensors(files)
        if tensors is not None:
            if state_dict is not None:
                model._fix_state_dict_keys_on_load(tensors)
            kept: list[str] = kwargs.get("keep_in_fp32_modules") or []
            own = model.state_dict().keys()
            wanted = {name: (stored, _dtype(name, stored, kwargs["dtype"], kept)) for name, stored in tensors.items()}
            state_dict = _Arriving(cls._triptych_staging, {name: wanted[name] for name in wanted if name in own})
        loading: Any = super()
        return loading._load_pretrained_model(model, state_dict, files, *args, **kwargs)


def _dtype(name: str, stored: Stored, dtype: torch.dtype, kept: list[str]) -> torch.dtype:
    """What Diffusers casts a tensor to, or what does no harm before it does."""
    if not stored.dtype.is_floating_point or not set(kept).isdisjoint(name.split(".")):
        return stored.dtype
    return dtype


class _Arriving(dict[str, Any]):
    """Tensors on the device, by name. All are begun when they are asked for, and each is given once it is there."""

    def __init__(self, staging: Staging, wanted: Mapping[str, tuple[Stored, torch.dtype]]) -> None:
        super().__init__(wanted)
        self._staging = staging

    def items(self) -> Any:
        """Name and tensor."""
        begun = deque((name, self._staging.begin(stored, dtype)) for name, (stored, dtype) in super().items())
        return _arrived(begun)


def _arrived(begun: deque[tuple[str, OnTheWay]]) -> Iterator[tuple[str, Tensor]]:
    while begun:  # one that was given is not kept, because Diffusers may cast it
        name, tensor = begun.popleft()
        yield name, tensor.arrived()


class _Transformers:
    """What stands before a class of Transformers while one of its models is loaded."""

    _triptych_staging: Staging

    @classmethod
    def _load_pretrained_model(
        cls, model: Any, state_dict: dict[str, Any] | None, files: list[str], config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``config`` is of the loading; its threads ask for several tensors at a time."""
        tensors = None if config.hf_quantizer is not None else stored_tensors(files)
        if tensors is not None:
            staging = cls._triptych_staging
            state_dict = {name: _Slice(staging, stored) for name, stored in tensors.items()}
        loading: Any = super()
        return loading._load_pretrained_model(model, state_dict, files, config, *args, **kwargs)


class _Slice:
    """A tensor of a file as Transformers takes it from safetensors: it is read when it is indexed, and then moved."""

    def __init__(self, staging: Staging, stored: Stored) -> None:
        self._staging = staging
        self._stored = stored

    def __getitem__(self, index: Any) -> Any:
        """All of it, to be read by `to`; a part is mapped."""
        return self if index is ... else self._stored.mapped()[index]

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on a device, in the file's dtype where no other is said."""
        if device is None or not self._staging.reaches(torch.device(device)):
            return self._stored.mapped().to(device=device, dtype=dtype)
        return self._staging.begin(self._stored, dtype).arrived()
