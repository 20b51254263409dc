"""Branches of guidance on ranks of their own: exact, because each branch is computed as it always is, only elsewhere.

Every rank runs the same blocks. A guider begins a step by saying which branches it wants; the model then answers the
forwards of this rank's branches, and the others with blanks; before the guider combines them, each branch is broadcast
by the rank that computed it. A step with one branch is computed by everyone.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from triptych.accel.guiders import watched

_KNOWN_ANSWERS: Final = 256
"""Input shapes whose answers' shapes are remembered."""


@dataclass(slots=True)
class _Step:
    """A step between the guider's asking for branches and its combining them."""

    branch: int = 0


_STEP: ContextVar[_Step | None] = ContextVar("step", default=None)
"""The guided step of the running greenlet; each greenlet has its own."""


class BranchSharing:
    """Spreads the branches of guidance over dimension ``cfg`` of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group("cfg")
        self._ranks = dist.get_process_group_ranks(self._group)
        self._mine = self._ranks.index(dist.get_rank())

    @property
    def in_step(self) -> bool:
        """Whether the branches of a guided step are being computed."""
        return _STEP.get() is not None

    def install(self, model: nn.Module) -> None:
        """Have ``model`` compute this rank's branches alone, inside of guided steps."""
        compute: Callable[..., Any] = model.forward
        answers: OrderedDict[object, Any] = OrderedDict()

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            step = _STEP.get()
            if step is None:
                return compute(*args, **kwargs)
            branch, step.branch = step.branch, step.branch + 1
            shapes = _shapes((args, kwargs))
            if branch % len(self._ranks) != self._mine and shapes in answers:
                return pytree.tree_map(_blank, answers[shapes])
            # An answer of unknown shape is computed once by everybody.
            answer = compute(*args, **kwargs)
            answers[shapes] = pytree.tree_map(_outline, answer)
            answers.move_to_end(shapes)
            if len(answers) > _KNOWN_ANSWERS:
                answers.popitem(last=False)
            return answer

        model.forward = forward

    def share(self, guider: Any) -> Any:
        """``guider``, one request's own, beginning and ending steps that are shared. Other guiders are unchanged."""
        return watched(guider, self)

    def begin(self, branches: Sequence[Any]) -> None:
        """The guider wants these branches."""
        _STEP.set(_Step() if len(branches) > 1 else None)

    def gather(self, branches: Sequence[Any]) -> None:
        """Bring every branch's prediction to every rank."""
        if not self.in_step:
            return
        _STEP.set(None)
        for number, branch in enumerate(branches):
            branch.noise_pred = branch.noise_pred.contiguous()
            dist.broadcast(branch.noise_pred, src=self._ranks[number % len(self._ranks)], group=self._group)


def _shapes(inputs: Any) -> object:
    """What decides the shape of an answer: the inputs' structure with shapes in place of tensors."""
    leaves, structure = pytree.tree_flatten(inputs)
    return repr(structure), tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf if isinstance(leaf, int | str) else None
        for leaf in leaves
    )


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _outline(leaf: Any) -> Any:
    return _Outline(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _blank(leaf: Any) -> Any:
    """Zeros, which are overwritten before anybody reads them."""
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, _Outline) else leaf
