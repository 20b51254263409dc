"""Step caching: a denoising step whose first block does what it did before lets the other blocks' work stand.

Theory of operation. Between neighbouring steps the first block's change to the hidden state tells how much all blocks
together will change theirs. Each forward runs the first block; when its change differs from the one kept by less than
a threshold (mean absolute difference over mean absolute value), the rest of the forward is replaced by what the rest
added when it was last computed. Results are not those of the uncached model.

What is kept belongs to one request and lies in its loop's own state, so that interleaved requests never see each
other's, and a checkpoint carries it along like everything else that the steps change. In a forward that several
requests share, each request's rows are compared with its own, and the rest is passed over only where that is right for
all of them: who could have skipped alone is then computed, which is the more exact.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from triptych.accel.tally import Tally
from triptych.errors import ConfigError

FIELD: Final = "triptych_step_cache"
"""Where a loop's state keeps what its steps leave for the next ones."""


@dataclass(kw_only=True, slots=True)
class Step:
    """A step of one request that is being computed."""

    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """What the request keeps, by model, number of the forward in the step, and name."""
    forwards: int = 0
    """Those computed in this step: they are the guidance branches, always in the same order."""
    models: set[str] = field(default_factory=set[str])
    """Those that have computed in this step."""

    def turn_of(self, model: str) -> None:
        """``model`` computes: what another one keeps goes where that had the steps before, and its turn is over."""
        if not any(_model_of(key) == model for key in self.values):
            for key in [key for key in self.values if _model_of(key) not in self.models]:
                del self.values[key]
        self.models.add(model)


@dataclass(kw_only=True, slots=True)
class StepMemory:
    """The steps that the present forward may read and write; exchanged by whoever runs the steps."""

    wanted: bool = False
    """Whether a model reads it."""
    steps: Sequence[Step] = ()
    """Whose forward is computed: one request's, or several ones' in the order of the batch; none outside a step."""
    shares: list[_Share] = field(default_factory=list["_Share"])
    """Of these in the forward that is under way."""

    def enter(self, state: Any) -> None:
        """A step begins on a loop with this ``state``."""
        values: dict[str, Tensor] | None = getattr(state, FIELD, None)
        self.steps = () if values is None else (Step(values=values),)

    def leave(self) -> None:
        """A step has ended, however it did: nothing of it is held here."""
        self.steps = ()
        self.shares = []

    @contextlib.contextmanager
    def exchanged(self, steps: Sequence[Step]) -> Generator[Sequence[Step]]:
        """For a while forwards are of ``steps``, or of none; gives those that they were of, and are of afterwards.

        What fails in between may be tried again, as the same forward of its step.
        """
        before, forwards = self.steps, [step.forwards for step in steps]
        self.steps = steps
        try:
            yield before
        except BaseException:
            for step, number in zip(steps, forwards, strict=True):
                step.forwards = number
            raise
        finally:
            self.steps = before
            self.shares = []


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
        if not self._cache.memory.steps:
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
class _Share:
    """The rows of one request in a forward whose first block has been computed."""

    step: Step
    key: str
    """Of this forward among what the request keeps."""
    change: Tensor
    """Of the picture by the first block."""
    streams: list[Tensor]
    """What the first block gave."""

    @property
    def kept(self) -> list[Tensor] | None:
        """The change that the first block made before, and what the rest then added to each stream. None where it is
        not there, or of other shapes: texts in a shared forward are as long as the longest."""
        names = ["first", *_rests(self.streams)]
        kept = [value for name in names if (value := self.step.values.get(f"{self.key}.{name}")) is not None]
        shapes = [now.shape for now in (self.change, *self.streams)]
        return kept if [value.shape for value in kept] == shapes else None

    def keep(self, streams: Sequence[Tensor]) -> None:
        """The last block gave ``streams``."""
        self.step.values[f"{self.key}.first"] = self.change
        for name, last, first in zip(_rests(streams), streams, self.streams, strict=True):
            self.step.values[f"{self.key}.{name}"] = last - first

    def forget(self) -> None:
        """What is kept will be replaced; until then it is of no use, and the forward has its memory."""
        for name in ("first", *_rests(self.streams)):
            self.step.values.pop(f"{self.key}.{name}", None)


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

    def begin(self, before: Tensor, after: Any) -> None:
        """The first block has turned ``before`` into the last stream of ``after``: decide about the others."""
        steps, streams = self.memory.steps, _streams(after)
        self.streams = len(streams)
        shares: list[_Share] = []
        for step, given, own in zip(steps, before.chunk(len(steps)), _rows(streams, len(steps)), strict=True):
            step.turn_of(self.name)
            key = f"{self.name}.{step.forwards}"
            shares.append(_Share(step=step, key=key, change=own[-1] - given, streams=own))
        self.memory.shares = shares
        self.skipping = self._may_skip(shares)
        if self.skipping:
            self.tally.steps_skipped += len(shares)
        else:
            for share in shares:
                share.forget()

    def _may_skip(self, shares: Sequence[_Share]) -> bool:
        """Whether the first block has done for every request what it did before."""
        differences: list[Tensor] = []
        for share in shares:
            if (kept := share.kept) is None:
                return False
            differences.append(_difference(share.change, kept[0]))
        found: list[float] = torch.stack(differences).tolist()  # at once: each look waits for the GPU
        return all(difference < self.threshold for difference in found)

    def end(self, after: Any) -> Any:
        """What the last block gives back; when blocks were passed over, with what they last added."""
        shares, self.memory.shares = self.memory.shares, []
        streams = _streams(after)
        for share in shares:
            share.step.forwards += 1
        if not self.skipping:
            for share, own in zip(shares, _rows(streams, len(shares)), strict=True):
                share.keep(own)
            return after
        for number, name in enumerate(_rests(streams)):
            rests = [share.step.values[f"{share.key}.{name}"] for share in shares]
            streams[number] = streams[number] + (rests[0] if len(rests) == 1 else torch.cat(rests))
        return streams[0] if self.streams == 1 else tuple(streams)


def _model_of(key: str) -> str:
    return key.partition(".")[0]


def _streams(after: Any) -> list[Tensor]:
    return list(after) if isinstance(after, (tuple, list)) else [after]


def _rests(streams: Sequence[Tensor]) -> list[str]:
    """Under what it is kept what the rest added to each stream."""
    return [f"rest{number}" for number in range(len(streams))]


def _rows(streams: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """The streams of each of ``count`` requests of one batch size, which lie one after the other."""
    return [list(own) for own in zip(*(stream.chunk(count) for stream in streams), strict=True)]


def _difference(change: Tensor, kept: Tensor) -> Tensor:
    return (change - kept).abs().mean(dtype=torch.float32) / kept.abs().mean(dtype=torch.float32)
