"""Answers of components as plain values, and back: what a replay needs of them, and nothing that it does not.

A text encoder's answer may hold every layer's hidden states, logits over the vocabulary and a key-value cache, of
which a pipeline reads one tensor. Answers are therefore handed to the pipeline through readers that note what is read;
only that is kept, as it was before the pipeline could change it in place. The rest comes back as a placeholder that
cannot be used.

Plain form: nested lists whose first item says what follows, so that the codec of pipeline state carries them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from triptych.accel.answers import ReadOneByOne, ShownOutput, ShownTuple
from triptych.errors import StageError

Plain = list[Any]

_DISTRIBUTION = "distribution"
"""Stands for the class of what autoencoders return in place of latents, which is no output class."""

_LEAVES = (bool, int, float, str, torch.Tensor, torch.dtype, torch.device, torch.Generator, np.ndarray, Image.Image)


class OutputClasses:
    """The output classes of Diffusers and Transformers that a model's own components can give, by full name."""

    def __init__(self, components: Iterable[type[Any]]) -> None:
        from diffusers.models import modeling_outputs as of_diffusers
        from diffusers.models.autoencoders import vae
        from diffusers.utils.outputs import BaseOutput
        from transformers import modeling_outputs as of_transformers
        from transformers.utils.generic import ModelOutput

        modules = {module.__name__ for module in (of_diffusers, vae, of_transformers)}
        modules.update(base.__module__ for kind in components for base in kind.__mro__)
        self._classes: dict[str, type[Any]] = {_DISTRIBUTION: vae.DiagonalGaussianDistribution}
        for module in sorted(modules):
            if module.partition(".")[0] not in ("diffusers", "transformers"):
                continue
            for found in vars(sys.modules[module]).values():
                if isinstance(found, type) and issubclass(found, (BaseOutput, ModelOutput)):
                    self._classes[_name(found)] = found
        self._distribution = vae.DiagonalGaussianDistribution

    def flat(self, value: Any) -> Plain:
        """The plain form of ``value``. What cannot cross becomes a placeholder, which fails only when it is used."""
        if value is None or isinstance(value, _LEAVES):
            return ["value", value]
        if isinstance(value, Reader):
            return self._reader(value)
        if type(value) in (tuple, torch.Size, ReadTuple, ShownTuple):
            return ["tuple", [self.flat(item) for item in _read_items(value)]]
        if type(value) is list:
            return ["list", [self.flat(item) for item in value]]
        if isinstance(value, self._distribution):
            fields = {"parameters": value.parameters, "deterministic": value.deterministic}
            return ["output", _DISTRIBUTION, list(fields), [self.flat(item) for item in fields.values()]]
        if (name := _name(_kind(value))) in self._classes:
            return ["output", name, list(value), [self.flat(item) for item in value.values()]]
        if type(value) is dict and all(type(key) is str for key in value):
            return ["dict", list(value), [self.flat(item) for item in value.values()]]
        return ["unread", type(value).__name__]

    def _reader(self, reader: Reader) -> Plain:
        fields = {
            name: self.flat(reader.read[name]) if name in reader.read else ["unread", name] for name in reader.fields
        }
        return ["output", reader.name, list(fields), list(fields.values())]

    def rebuilt(self, plain: Any) -> Any:
        """What `flat` took apart; raises `StageError` for anything that it does not produce."""
        match plain:
            case ["value", value]:
                return value
            case ["zeros", [*shape], torch.dtype() as dtype, torch.device() as device]:
                return torch.zeros(shape, dtype=dtype, device=device)
            case ["unread", str(name)]:
                return Unread(name)
            case ["tuple", [*items]]:
                return tuple(self.rebuilt(item) for item in items)
            case ["list", [*items]]:
                return [self.rebuilt(item) for item in items]
            case ["dict", [*keys], [*items]] if len(keys) == len(items):
                return {key: self.rebuilt(item) for key, item in zip(keys, items, strict=True)}
            case ["output", str(name), [*keys], [*items]] if name in self._classes and len(keys) == len(items):
                fields = {key: self.rebuilt(item) for key, item in zip(keys, items, strict=True)}
                return self._classes[name](**fields)
            case _:
                raise StageError(f"not a recorded answer of this model's components: {str(plain)[:100]}")

    def noted(self, answer: Any) -> Any:
        """``answer`` as the pipeline gets it: outputs and tuples behind readers, tensors as clones."""
        if (name := _name(_kind(answer))) in self._classes and not isinstance(answer, self._distribution):
            return Reader(self, name, answer)
        if type(answer) is tuple or isinstance(answer, ShownTuple):
            return ReadTuple(self, answer)
        return answer


class Unread:
    """Stands where the recording pipeline read nothing."""

    def __init__(self, name: str) -> None:
        self.name = name


class Reader:
    """A component's output that notes which of its fields are read, by name or by position."""

    def __init__(self, classes: OutputClasses, name: str, fields: Mapping[str, Any]) -> None:
        self.name = name
        self.fields = fields
        self.read: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._classes = classes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.fields:
            raise AttributeError(f"the component's output has no {name!r}")
        return self._field(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._field(key)
        names = list(self.fields)[key]
        return tuple(map(self._field, names)) if isinstance(names, list) else self._field(names)

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __len__(self) -> int:
        return len(self.fields)

    def keys(self) -> Iterable[str]:
        """Names of the fields, which reads none of them."""
        return self.fields.keys()

    def to_tuple(self) -> tuple[Any, ...]:
        """All fields."""
        return self[:]

    def _field(self, name: str) -> Any:
        if name not in self._given:
            value = self.fields[name]
            given = self._classes.noted(value)
            self.read[name] = given if isinstance(given, (Reader, ReadTuple)) else value
            self._given[name] = given.clone() if isinstance(given, torch.Tensor) else given
        return self._given[name]


class ReadTuple(ReadOneByOne):
    """A tuple that notes which of its items are read; all of them when no single one is asked for."""

    read: set[int]
    items: tuple[Any, ...]
    _classes: OutputClasses

    def __new__(cls, classes: OutputClasses, items: tuple[Any, ...]) -> ReadTuple:
        # As they lie there: to go through the items is to read them, where they are fetched when they are read.
        self = super().__new__(cls, (tuple.__getitem__(items, place) for place in range(len(items))))
        self.read = set()
        self.items = items
        self._classes = classes
        return self

    def _read(self, place: int) -> Any:
        self.read.add(place)
        item = self.items[place]
        return item.clone() if isinstance(item, torch.Tensor) else item


def _read_items(value: Any) -> list[Any]:
    """Items of a tuple, with placeholders for those of a `ReadTuple` that were not read."""
    if not isinstance(value, ReadTuple):
        return list(value)
    if not value.read:
        return list(value.items)
    return [value.items[place] if place in value.read else Unread(str(place)) for place in range(len(value))]


def without_numbers(plain: Any, *, floats_only: bool) -> Any:
    """A plain form in which tensors are reduced to their shapes; with ``floats_only`` those of integers and booleans
    stay, for shapes may depend on them: masks, lengths, token numbers."""
    match plain:
        case ["value", torch.Tensor() as tensor]:
            if floats_only and not (tensor.is_floating_point() or tensor.is_complex()):
                return plain
            return ["zeros", list(tensor.shape), tensor.dtype, tensor.device]
        case ["value", _] | ["unread", _] | ["zeros", *_]:
            return plain
        case ["tuple" | "list" as kind, [*items]]:
            return [kind, [without_numbers(item, floats_only=floats_only) for item in items]]
        case ["dict", keys, [*items]]:
            return ["dict", keys, [without_numbers(item, floats_only=floats_only) for item in items]]
        case ["output", name, keys, [*items]]:
            return ["output", name, keys, [without_numbers(item, floats_only=floats_only) for item in items]]
        case _:
            raise StageError(f"not a recorded answer: {str(plain)[:100]}")


def _kind(value: Any) -> type[Any]:
    return value.kind if isinstance(value, ShownOutput) else type(value)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
