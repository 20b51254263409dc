"""Branches of guidance on ranks of their own: exact, because each branch is computed as it always is, only elsewhere.

Every rank runs the same blocks. Guiders begin a step by saying which branches they want; the model then answers the
forwards of this rank's branches, and the others with blanks. Whatever the loop writes to a branch after a forward is
that forward's: before a guider combines branches, it is broadcast by the rank that computed it, so that a step may have
several guiders, predictions and combinations. A step with one branch is computed by everyone.

A loop of another kind, whose branches and forwards are not one to one, is refused before it goes on with a blank.
Blanks are not numbers, so one that gets past all this can never look like a result.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from triptych.accel.guiders import watched
from triptych.errors import StageError

_KNOWN_ANSWERS: Final = 256
"""Input shapes whose answers' shapes are remembered."""


class _Step:
    """A step between the first guider's asking for branches and the next step."""

    def __init__(self) -> None:
        self.branches: list[_Branch] = []
        self.several = False
        """Whether a guider wants more than one."""
        self.forwards = 0
        self.combined = False
        """Whether a guider has combined branches; later forwards are computed by everyone."""

    @property
    def shared(self) -> bool:
        """Whether the forwards of now belong to branches that ranks share."""
        return self.several and not self.combined

    def add(self, states: Sequence[Any]) -> None:
        """A guider wants these."""
        self.branches += [_Branch(state) for state in states]
        self.several = self.several or len(states) > 1

    def attribute(self) -> None:
        """Find the branch that the last forward was for. Raises `StageError` where that is not exactly one."""
        if not self.forwards or not self.shared:
            return
        written = [branch for branch in self.branches if branch.forward is None and branch.written()]
        if len(written) != 1:
            raise StageError(
                f"a forward of this model makes {len(written)} branches of guidance, so that GPUs cannot share them: "
                "say denoiser-cfg=1"
            )
        written[0].forward = self.forwards - 1


class _Branch:
    """One branch of a step."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.forward: int | None = None
        """The number of the forward that it was computed by."""
        self._before = list(_tensors(state))  # kept, so that no other tensor can have the identity of one
        self._exchanged: list[torch.Tensor] = []

    def written(self) -> list[torch.Tensor]:
        """What it has got since it was prepared and was not exchanged, in the same order on all ranks."""
        known = {id(tensor) for tensor in (*self._before, *self._exchanged)}
        return list({id(tensor): tensor for tensor in _tensors(self.state) if id(tensor) not in known}.values())

    def exchange(self, source: int, group: dist.ProcessGroup) -> None:
        """Have the values of rank ``source`` in all that was written."""
        for tensor in self.written():
            whole = tensor.contiguous()
            dist.broadcast(whole, src=source, group=group)
            if whole is not tensor:
                tensor.copy_(whole)
            self._exchanged.append(tensor)


_STEP: ContextVar[_Step | None] = ContextVar("step", default=None)
"""The step of the running greenlet; each greenlet has its own."""


class BranchSharing:
    """Spreads the branches of guidance over dimension ``cfg`` of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group("cfg")
        self._ranks = dist.get_process_group_ranks(self._group)

    @property
    def in_step(self) -> bool:
        """Whether the branches of a guided step are being computed."""
        step = _STEP.get()
        return step is not None and step.shared

    def install(self, model: nn.Module) -> None:
        """Have ``model`` compute this rank's branches alone, inside of guided steps."""
        compute: Callable[..., Any] = model.forward
        answers: OrderedDict[object, Any] = OrderedDict()

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            step = _STEP.get()
            if step is None:
                return compute(*args, **kwargs)
            step.attribute()
            source = self._source(step.forwards)
            step.forwards += 1
            if not step.shared:
                return compute(*args, **kwargs)
            shapes = _shapes((args, kwargs))
            if source != dist.get_rank() and shapes in answers:
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
        """A guider wants these branches, perhaps after another one of the same step."""
        step = _STEP.get()
        if not branches:
            _STEP.set(None)
            return
        if step is None or step.forwards:
            step = _Step()
            _STEP.set(step)
        step.add(branches)

    def gather(self, branches: Sequence[Any]) -> None:
        """Bring what was made of every branch to every rank. Raises `StageError` for a branch that no forward made."""
        step = _STEP.get()
        if step is None or not step.several:
            return
        step.attribute()
        step.combined = True
        known = {id(branch.state): branch for branch in step.branches}
        for state in branches:
            branch = known.get(id(state))
            if branch is None or branch.forward is None:
                raise StageError(
                    "guidance combines a branch that no forward of its own made, so that GPUs cannot share them: say "
                    "denoiser-cfg=1"
                )
            branch.exchange(self._source(branch.forward), self._group)

    def _source(self, forward: int) -> int:
        """The rank that computes a step's forward of that number."""
        return self._ranks[forward % len(self._ranks)]


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors that a branch holds, and those in its lists and so on."""
    return (
        leaf for value in vars(state).values() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)
    )


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
    """What is overwritten before anybody reads it; not a number where the dtype has that."""
    if not isinstance(leaf, _Outline):
        return leaf
    value = math.nan if leaf.dtype.is_floating_point or leaf.dtype.is_complex else 0
    return torch.full(leaf.shape, value, dtype=leaf.dtype, device=leaf.device)
