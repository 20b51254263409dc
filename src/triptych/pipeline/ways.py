"""What GPUs of one instance can share of a pipeline class's work, read off the types that it declares.

The same is asked of a model's configs when it is loaded (`sharing`), which also know whether the degrees divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from triptych.accel.parallel.tensor import PLANNED
from triptych.accel.parallel.text import PLANNED as TEXT_PLANNED
from triptych.ids import Role
from triptych.pipeline.anatomy import Anatomy
from triptych.pipeline.cut import Cut, walk

Way: TypeAlias = Literal["cfg", "sp", "tp", "encoder-tp"]
"""The flags' words: branches of guidance, tokens, weights of the denoiser, weights of a text encoder."""


def modular_ways(parts: Cut) -> tuple[Way, ...]:
    """Of a pipeline that is cut at its blocks."""
    declared = [spec for part in parts.parts.values() for block in walk(part) for spec in block.expected_components]
    guided = any(hasattr(spec.type_hint, "prepare_models") for spec in declared)
    denoiser = [spec.type_hint for spec in parts.executed[Role.DENOISER].expected_components]
    text = any(getattr(spec.type_hint, "__name__", "") in TEXT_PLANNED for spec in declared)
    found: list[Way] = ["cfg"] if guided and any(map(_is_denoiser, denoiser)) else []
    return (*found, *_of_denoisers(denoiser), *(("encoder-tp",) if text else ()))


def replay_ways(kind: type[Any], anatomy: Anatomy) -> tuple[Way, ...]:
    """Of a classic pipeline class that is replayed: its guidance is one batch, and its encoder is on one GPU."""
    types: dict[str, Iterable[Any]] = kind._get_signature_types()
    return tuple(_of_denoisers(one for name in anatomy.denoisers for one in types.get(name, ())))


def _of_denoisers(types: Iterable[Any]) -> Iterator[Way]:
    models = [kind for kind in types if _is_denoiser(kind)]
    if models and all(kind._cp_plan for kind in models):
        yield "sp"
    if models and all(kind.__name__ in PLANNED for kind in models):
        yield "tp"


def _is_denoiser(kind: Any) -> bool:
    """As of the loaded models: one of Diffusers' own that is no autoencoder."""
    return hasattr(kind, "_cp_plan") and not hasattr(kind, "decode")
