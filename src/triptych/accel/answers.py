"""Answers of models of which only what is read is fetched: outputs, tuples and tensors in the place of the real ones.

A language model's answer may hold every layer's hidden states, logits over the vocabulary and a key-value cache, of
which a pipeline reads one tensor. Whoever keeps answers wants that tensor alone, and knows which it is when it is read.
A `Form` is what there is to be read, without the tensors; `shown` gives it to a caller, for whom each part is fetched
at its first use. Whatever reads a part gets a plain tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Path = tuple[str | int, ...]
"""Where a part is in its answer: names of fields, places in tuples."""

Fetch = Callable[[Path], Any]

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""What is a part of a form itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Something that is fetched: a tensor, or an object that nothing is known of."""

    is_tensor: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Items:
    forms: tuple[Form, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    kind: type[Any]
    forms: dict[str, Form]


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    value: Any


Form = _Part | _Items | _Fields | _Given


def form_of(value: Any) -> Form:
    """What there is to be read of ``value``."""
    from transformers.utils.generic import ModelOutput

    if isinstance(value, PLAIN):
        return _Given(value)
    if isinstance(value, ModelOutput):
        return _Fields(type(value), {name: form_of(item) for name, item in value.items()})
    if type(value) is tuple:
        return _Items(tuple(map(form_of, value)))
    return _Part(isinstance(value, Tensor))


def part_of(value: Any, path: Path) -> Any:
    """The part of a real answer that is at ``path``."""
    return functools.reduce(lambda whole, step: whole[step], path, value)


def shown(form: Form, fetch: Fetch, path: Path = ()) -> Any:
    """What has that form, whose parts come from ``fetch`` when they are read. Those of a tuple or of an output are read
    one by one, and anything else at once. ``fetch`` gives the same object for the same path."""
    match form:
        case _Given(value):
            return value
        case _Part():
            return fetch(path)
        case _Items(forms):
            return ShownTuple(forms, fetch, path)
        case _Fields(kind, forms):
            return ShownOutput(kind, forms, fetch, path)


class ShownOutput(Mapping[str, Any]):
    """A Transformers output, read by name or by position. Those of its fields that are None are not listed."""

    def __init__(self, kind: type[Any], forms: Mapping[str, Form], fetch: Fetch, path: Path) -> None:
        self.kind = kind
        """The class that it stands for."""
        self._forms = forms
        self._fetch = fetch
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{self.kind.__name__} has no {name!r}")
        if name in self._forms:
            return self[name]
        if any(field.name == name for field in dataclasses.fields(self.kind)):
            return None
        return getattr(self._fetch(self._path), name)  # an old name of a field, or a method

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return shown(self._forms[key], self._fetch, (*self._path, key))
        names = list(self._forms)[key]
        return tuple(self[name] for name in names) if isinstance(names, list) else self[names]

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def to_tuple(self) -> tuple[Any, ...]:
        """All fields."""
        return self[:]


class ReadOneByOne(tuple[Any, ...]):
    """A tuple that hears of each item that Python reads."""

    def _read(self, place: int) -> Any:
        """The item that is read there."""
        raise NotImplementedError

    @overload
    def __getitem__(self, key: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: Any) -> Any:
        places = range(len(self))[key]
        return self._read(places) if isinstance(places, int) else tuple(map(self._read, places))

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, range(len(self)))


class ShownTuple(ReadOneByOne):
    """A tuple whose items are fetched one by one where Python reads them.

    Torch reads a tuple past its methods, and finds stand-ins there that fetch what they stand for.
    """

    _fetch: Callable[[int], Any]

    def __new__(cls, forms: tuple[Form, ...], fetch: Fetch, path: Path) -> ShownTuple:
        def read(place: int) -> Any:
            return shown(forms[place], fetch, (*path, place))

        self = super().__new__(
            cls,
            (
                _StandIn.of(functools.partial(read, place)) if form == _Part(True) else _unread(form, read, place)
                for place, form in enumerate(forms)
            ),
        )
        self._fetch = read
        return self

    def _read(self, place: int) -> Any:
        return self._fetch(place)


def _unread(form: Form, read: Callable[[int], Any], place: int) -> Any:
    """An item of a tuple as it lies there; of an object that nothing is known of only its place."""
    return None if isinstance(form, _Part) else read(place)


class _StandIn(Tensor):
    """Stands for a tensor that nobody has read yet, and is read by any function of torch that it is given to."""

    _stands_for: Callable[[], Tensor]

    @staticmethod
    def of(real: Callable[[], Tensor]) -> _StandIn:
        made: Any = Tensor._make_subclass(_StandIn, torch.empty(0))  # pyright: ignore[reportPrivateUsage]
        made._stands_for = real
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        real: Any = pytree.tree_map(_fetched, (args, dict(kwargs or {})))
        return func(*real[0], **real[1])


def _fetched(value: Any) -> Any:
    if isinstance(value, _StandIn):
        return value._stands_for()  # pyright: ignore[reportPrivateUsage]
    return tuple(value) if isinstance(value, ShownTuple) else value
