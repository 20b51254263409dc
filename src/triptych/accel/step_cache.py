"""Step caching: a denoising step whose first block does what it did before lets the other blocks' work stand.

Theory of operation. Between neighbouring steps the first block's change to the hidden state tells how much all blocks
together will change theirs. Each forward runs the first block; when its change differs from the one kept by less than
a threshold (mean absolute difference over mean absolute value), the rest of the forward is replaced by what the rest
added when it was last computed. Results are not those of the uncached model.

What is kept belongs to one request and lies in its loop's own state, so that interleaved requests never see each
other's, and a checkpoint carries it along like everything else that the steps change.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from triptych.accel.tally import Tally
from triptych.errors import ConfigError

FIELD: Final = "triptych_step_cache"
"""Where a loop's state keeps what its steps leave for the next ones."""


@dataclass(kw_only=True, slots=True)
class StepMemory:
    """The state that the present step may read and write; exchanged by whoever runs the steps."""

    wanted: bool = False
    """Whether a model reads it."""
    values: dict[str, Tensor] | None = None
    """Of the request whose step is being computed; None outside a step."""
    call: int = 0
    """Forwards begun in this step: they are the guidance branches, always in the same order."""
    models: set[str] = field(default_factory=set[str])
    """Those that have computed in this step."""
    after_first: list[Tensor] = field(default_factory=list[Tensor])
    """What the first block of the forward that is under way gave."""

    def enter(self, state: Any) -> None:
        """A step begins on a loop with this ``state``."""
        self.values = getattr(state, FIELD, None)
        self.call = 0
        self.models = set()

    def leave(self) -> None:
        """A step has ended, however it did: nothing of it is held here."""
        self.values = None
        self.after_first = []


def install(model: nn.Module, name: str, threshold: float, memory: StepMemory, tally: Tally) -> None:
    """Give ``model``, called ``name`` in its pipeline, step caching in place; after compiling, if it is compiled.

    Raises `ConfigError` for a model that does not run one list of equal blocks, of a picture alone or of it and a text.
    """
    kinds: list[str] = getattr(model, "_repeated_blocks", None) or []
    lists = [
        child
        for child in model.children()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and all(type(block).__name__ in kinds for block in child)
    ]
    if len(lists) != 1:
        raise ConfigError(f"step-cache={threshold}: {type(model).__name__} has {len(lists)} lists of blocks, not one")
    blocks = lists[0]
    taken = {name for name in inspect.signature(blocks[0].forward).parameters if name.endswith("hidden_states")}
    if "hidden_states" not in taken or taken - {"hidden_states", "encoder_hidden_states"}:
        raise ConfigError(
            f"step-cache={threshold}: the blocks of {type(model).__name__} take other streams than it knows"
        )
    cache = _Forward(name=name, threshold=threshold, memory=memory, tally=tally, last=len(blocks) - 1)
    for index, block in enumerate(list(blocks)):
        blocks[index] = _Watched(block, index, cache)
    memory.wanted = True


class _Watched(nn.Module):
    """A block that may be passed over."""

    def __init__(self, block: nn.Module, index: int, cache: _Forward) -> None:
        super().__init__()
        self.block = block
        self._index = index
        self._cache = cache
        self._signature = inspect.signature(block.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._cache.memory.values is None:
            return self.block(*args, **kwargs)
        before = self._signature.bind(*args, **kwargs).arguments
        if self._index == 0:
            after = self.block(*args, **kwargs)
            self._cache.begin(before["hidden_states"], after)
            return after
        if not self._cache.skipping:
            after = self.block(*args, **kwargs)
        else:  # blocks give back the streams that they were given: the picture's alone, or the text's and the picture's
            picture = before["hidden_states"]
            after = picture if self._cache.streams == 1 else (before["encoder_hidden_states"], picture)
        return self._cache.end(after) if self._index == self._cache.last else after


@dataclass(kw_only=True, slots=True)
class _Forward:
    """The forward of one model that is under way, if one is."""

    name: str
    threshold: float
    memory: StepMemory
    tally: Tally
    last: int
    """Index of the last block."""
    skipping: bool = False
    streams: int = 1
    _key: str = ""

    def begin(self, before: Tensor, after: Any) -> None:
        """The first block has turned ``before`` into the last stream of ``after``: decide about the others."""
        values = self.memory.values
        assert values is not None
        if not any(_model_of(key) == self.name for key in values):
            for key in [key for key in values if _model_of(key) not in self.memory.models]:
                del values[key]  # of the model that had the steps before, whose turn is over
        self.memory.models.add(self.name)
        self._key = f"{self.name}.{self.memory.call}"
        self.memory.call += 1
        streams = _streams(after)
        self.streams = len(streams)
        change = streams[-1] - before
        kept = values.get(f"{self._key}.first")
        self.skipping = kept is not None and kept.shape == change.shape and _difference(change, kept) < self.threshold
        if self.skipping:
            self.tally.steps_skipped += 1
        else:
            values[f"{self._key}.first"] = change
            self.memory.after_first = streams

    def end(self, after: Any) -> Any:
        """What the last block gives back; when blocks were passed over, with what they last added."""
        values = self.memory.values
        assert values is not None
        streams = _streams(after)
        names = [f"{self._key}.rest{number}" for number in range(len(streams))]
        if self.skipping:
            streams = [stream + values[name] for stream, name in zip(streams, names, strict=True)]
            return streams[0] if self.streams == 1 else tuple(streams)
        for name, stream, first in zip(names, streams, self.memory.after_first, strict=True):
            values[name] = stream - first
        self.memory.after_first = []
        return after


def _model_of(key: str) -> str:
    return key.partition(".")[0]


def _streams(after: Any) -> list[Tensor]:
    return list(after) if isinstance(after, (tuple, list)) else [after]


def _difference(change: Tensor, kept: Tensor) -> float:
    distance = (change - kept).abs().mean(dtype=torch.float32) / kept.abs().mean(dtype=torch.float32)
    return float(distance)
