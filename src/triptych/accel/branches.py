"""The branches of a step's guidance in one forward, where that is measured to be faster.

A guider says which branches it wants, the loop asks the model for one after the other, and nobody looks at a prediction
before the guider combines them. So the model answers with blanks, remembers what it was asked, and fills the blanks at
the last moment, all at once. The first step of a kind is computed as it always was, which shows whether the loop really
keeps what it was given; the second one measures. Results differ by rounding from those of branches computed alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from triptych.accel.batching import Call, ForwardBatcher, call_of
from triptych.accel.guiders import changes_model, watched

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """A guided step: the calls so far, and what each was answered."""

    calls: list[Call] = field(default_factory=list[Call])
    answers: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    blank: bool = False
    """Whether the answers are to be filled yet."""


@dataclass(slots=True)
class _Kind:
    """Calls of equal shapes."""

    outline: list[Tensor]
    """Tensors of an answer, without memory."""
    spec: Any
    kept: bool
    """Whether the loop keeps what it is given until the guider combines it."""


_STEP: ContextVar[_Step | None] = ContextVar("branches", default=None)
"""The guided step of the running greenlet; each greenlet has its own."""


class BranchBatching:
    """Joins the branches of guidance of each request. Used from one thread."""

    def __init__(self, *, brings_weights: bool = False) -> None:
        """``brings_weights`` as of a `ForwardBatcher`."""
        self._batcher = ForwardBatcher(most=2, brings_weights=brings_weights)
        self._kinds: dict[Hashable, _Kind] = {}
        self._models: list[str] = []
        self._told = False

    def install(self, model: nn.Module) -> None:
        """Have forwards of ``model`` in guided steps joined."""
        compute: Callable[..., Any] = model.forward
        self._models.append(type(model).__name__)

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            step = _STEP.get()
            if step is None:
                return compute(*args, **kwargs)
            call = call_of(compute, args, kwargs)
            step.calls.append(call)
            kind = self._kinds.get(call.key)
            if kind is not None and kind.kept and (step.blank or len(step.calls) == 1):
                step.blank = True
                step.answers.append([torch.empty_like(leaf, device=_device(call)) for leaf in kind.outline])
                return pytree.tree_unflatten(list(step.answers[-1]), kind.spec)
            if step.blank:  # the branches are of different kinds after all
                self._fill(step)
            answer = compute(*args, **kwargs)
            self._look(call, answer, step)
            return answer

        model.forward = forward

    def guider(self, guider: Any) -> Any:
        """``guider``, one request's own, with its branches joined; one that changes the model for a branch is left."""
        return guider if changes_model(guider) else watched(guider, self)

    def begin(self, branches: Sequence[Any]) -> None:
        """The guider wants these branches."""
        _STEP.set(_Step() if len(branches) > 1 else None)

    def gather(self, branches: Sequence[Any]) -> None:
        """Compute what was put off; or learn whether it can be, the next time."""
        step = _STEP.get()
        _STEP.set(None)
        if step is None:
            return
        if step.blank:
            self._fill(step)
        elif len(step.calls) == len(branches):
            for call, answer, branch in zip(step.calls, step.answers, branches, strict=True):
                if call.key in self._kinds:
                    self._kinds[call.key].kept = _is_part_of(branch.noise_pred, answer)
                    self._tell(self._kinds[call.key])

    def _tell(self, kind: _Kind) -> None:
        if not kind.kept and not self._told:
            self._told = True
            log.warning(
                "batch-guidance has no effect on %s: its loop changes what was predicted for a branch before "
                "the guider combines them",
                ", ".join(self._models),
            )

    def _look(self, call: Call, answer: Any, step: _Step) -> None:
        leaves, spec = pytree.tree_flatten(answer)
        step.answers.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        if call.key not in self._kinds and all(isinstance(leaf, Tensor) for leaf in leaves):
            outline = [torch.empty_like(leaf, device="meta") for leaf in leaves]
            self._kinds[call.key] = _Kind(outline=outline, spec=spec, kept=False)

    def _fill(self, step: _Step) -> None:
        """Compute the calls that were answered with blanks. Raises what computing one raises."""
        put_off = step.calls[: len(step.answers)]
        self._batcher.run(put_off)
        for call, blanks in zip(put_off, step.answers, strict=True):
            if call.error is not None:
                raise call.error
            for blank, made in zip(blanks, pytree.tree_leaves(call.result), strict=True):
                blank.copy_(made)
        step.calls.clear()
        step.answers.clear()
        step.blank = False


def _device(call: Call) -> torch.device:
    return next(leaf.device for leaf in call.leaves if isinstance(leaf, Tensor))


def _is_part_of(prediction: Any, answer: list[Tensor]) -> bool:
    """Whether what the loop has kept is memory of what the model gave, so that filling that one later fills this."""
    return isinstance(prediction, Tensor) and any(
        prediction.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() for leaf in answer
    )
