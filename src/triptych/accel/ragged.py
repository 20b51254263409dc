"""Models of which a forward takes texts of several lengths at once, and how they come in it.

Their pipelines do not pad the text, so nearly every prompt has a length of its own, and calls that were joined only
where all shapes are equal would hardly ever be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """The keyword arguments of one class of models whose length may differ from output to output."""

    padded: frozenset[str] = frozenset()
    """Tensors [batch, length, ...] that can be made longer with zeros, which ``mask`` hides."""
    mask: str = ""
    """The one of ``padded`` that is zero where the others do not count. Without it none of them can be made longer."""
    lists: frozenset[str] = frozenset()
    """Lists of tensors [length, ...], one for each output, in which each has its own length."""

    def names(self, kwargs: Mapping[str, Any]) -> dict[int, str]:
        """The arguments among ``kwargs`` whose length may differ, by their address."""
        masked = isinstance(kwargs.get(self.mask), Tensor)
        found = {name for name in self.padded if masked and isinstance(kwargs.get(name), Tensor)}
        found |= {name for name in self.lists if _is_list_of_tensors(kwargs.get(name))}
        return {id(kwargs[name]): name for name in found}


EVEN: Final = Ragged()
"""Of models that take what is of one length alone."""

_RAGGED: Final[Mapping[str, Ragged]] = {
    "QwenImageTransformer2DModel": Ragged(
        padded=frozenset({"encoder_hidden_states", "encoder_hidden_states_mask"}), mask="encoder_hidden_states_mask"
    ),
    "ZImageTransformer2DModel": Ragged(lists=frozenset({"x", "cap_feats"})),
}

ALONE: Final[Mapping[str, str]] = {"Cosmos3OmniTransformer": "it packs one request's tokens into one sequence"}
"""Models whose forwards cannot be joined, and why."""


def ragged_of(model: nn.Module) -> Ragged:
    """What of a model's arguments may differ in length."""
    return _RAGGED.get(type(model).__name__, EVEN)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Tensor) and one.ndim for one in value)
