"""What GPUs of one instance can share of a pipeline class's work, read off the types that it declares.

The same is asked of a model's configs when it is loaded (`sharing`), which also know whether the degrees divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from triptych.accel.parallel.sequence import ways_of
from triptych.accel.parallel.tensor import PLANNED
from triptych.accel.parallel.text import PLANNED as TEXT_PLANNED
from triptych.accel.wan_vae import supports_class
from triptych.ids import Role
from triptych.pipeline.anatomy import Anatomy
from triptych.pipeline.cut import Cut, walk

Way: TypeAlias = Literal["cfg", "ulysses", "ring", "tp", "encoder-tp", "decoder-tp"]
"""The flags' words: branches of guidance, tokens in two ways, weights of the denoiser, weights of a text encoder,
strips of pictures."""


def modular_ways(parts: Cut) -> tuple[Way, ...]:
    """Of a pipeline that is cut at its blocks."""
    denoiser = [spec.type_hint for spec in parts.executed[Role.DENOISER].expected_components]
    guided: list[Way] = ["cfg"] if is_guided(parts) and any(map(_is_denoiser, denoiser)) else []
    text: list[Way] = ["encoder-tp"] if any(_name(kind) in TEXT_PLANNED for kind in _declared(parts)) else []
    decoder = (spec.type_hint for spec in parts.executed[Role.DECODER].expected_components)
    return (*guided, *_of_denoisers(denoiser), *text, *_of_decoders(decoder))


def replay_ways(kind: type[Any], anatomy: Anatomy) -> tuple[Way, ...]:
    """Of a classic pipeline class that is replayed: its guidance is one batch, and its encoder is on one GPU.

    Keys that are kept from step to step are not exchanged in Diffusers, whatever the transformer's plan.
    """
    types: dict[str, Iterable[Any]] = kind._get_signature_types()
    shared = () if anatomy.keeps_keys else anatomy.denoisers
    denoisers = _of_denoisers(one for name in shared for one in types.get(name, ()))
    return (*denoisers, *_of_decoders(one for several in types.values() for one in several))


def is_guided(parts: Cut) -> bool:
    """Whether a guider of Diffusers, made from a config or loaded, has guidance in one forward for each branch."""
    return any(hasattr(kind, "prepare_models") for kind in _declared(parts))


def _declared(parts: Cut) -> list[Any]:
    """The types of all components."""
    specs = (spec for part in parts.parts.values() for block in walk(part) for spec in block.expected_components)
    return [spec.type_hint for spec in specs]


def _of_denoisers(types: Iterable[Any]) -> Iterator[Way]:
    models = [kind for kind in types if _is_denoiser(kind)]
    if not models:
        return
    ways = [ways_of(kind.__name__, kind._cp_plan) for kind in models]
    for way in ways[0]:
        if all(way in others for others in ways):
            yield way
    if all(kind.__name__ in PLANNED for kind in models):
        yield "tp"


def _of_decoders(types: Iterable[Any]) -> Iterator[Way]:
    if any(supports_class(_name(kind), None) for kind in types):
        yield "decoder-tp"


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", "")


def _is_denoiser(kind: Any) -> bool:
    """As of the loaded models: one of Diffusers' own that is no autoencoder."""
    return hasattr(kind, "_cp_plan") and not hasattr(kind, "decode")
