"""A pipeline that runs on several ranks in lock-step, to the compute thread a pipeline like any other.

Each call on a run of a shared role is given to the followers as an order, carried out here as well, and settled: it has
gone the same everywhere before the next one. What comes before the first step may fail on some ranks, since nothing is
exchanged there: the run is then over on all of them. Other roles run on rank 0 alone. So are checkpoints taken, because
between two steps every rank has the same state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from triptych.accel.sizes import is_rehearsing
from triptych.accel.tally import Tally
from triptych.config import InstanceConfig
from triptych.errors import StageError
from triptych.ids import Role
from triptych.pipeline.checkpoint import Frozen
from triptych.pipeline.load import load_cold
from triptych.pipeline.stage import (
    Announcing,
    Clip,
    Preparable,
    Preparing,
    Resumable,
    RolePipeline,
    StageResult,
    StageRun,
    Streaming,
)
from triptych.wire.schema import RequestSchema
from triptych.worker.ranks.leader import Leader, sent
from triptych.worker.ranks.orders import Advance, Begin, Drop, Prepare, Resume


def load_in_lockstep(config: InstanceConfig, leader: Leader, tally: Tally) -> RolePipeline:
    """Load on all ranks and warm up; ``tally`` counts what happens on this one, the leader what the others compile.

    Raises what loading raises, and `RanksApart`.
    """
    pipeline, warm_up = load_cold(config.model, config.roles, config.torch_device, tally, leader.join())
    leader.await_ready()
    shared = LockstepPipeline(pipeline, leader, config.shared_roles)
    warm_up(shared)
    return shared


class LockstepPipeline:
    """`RolePipeline` of rank 0, whose followers take part in the stages of some roles."""

    def __init__(self, own: RolePipeline, leader: Leader, shared: tuple[Role, ...] = (Role.DENOISER,)) -> None:
        self._own = own
        self._leader = leader
        self._shared = shared
        self._numbers = itertools.count()

    @property
    def roles(self) -> tuple[Role, ...]:
        """Loaded roles in the order in which a request passes them."""
        return self._own.roles

    @property
    def schema(self) -> RequestSchema:
        """What requests may say."""
        return self._own.schema

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints compute equal bytes."""
        return self._own.fingerprint

    @property
    def attention(self) -> dict[str, str]:
        """The attention of rank 0, which is that of all."""
        return self._own.attention

    @property
    def sharing(self) -> str:
        """How the ranks share the work."""
        return self._own.sharing

    @property
    def prepares(self) -> bool:
        """Whether a run may begin and be prepared while another one computes."""
        return isinstance(self._own, Preparing) and self._own.prepares

    def start(
        self,
        role: Role,
        params: Mapping[str, Any],
        inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]],
        images: Sequence[bytes],
    ) -> StageRun:
        """Begin a stage; see `RolePipeline.start`. What is refused here is never heard of by the followers."""
        run = self._own.start(role, params, inputs, images)
        if role not in self._shared:
            return run
        number = next(self._numbers)
        begin = Begin(
            run=number,
            role=role,
            params=dict(params),
            inputs=tuple(sent(*one) for one in inputs),
            images=tuple(images),
            rehearses=is_rehearsing(),
        )
        begun = _kind(run)(number, run, self._leader)
        try:
            self._leader.tell(begin, [tensor for _, tensors in inputs for tensor in tensors])
            _agree(self._leader.failure())
        except Exception:
            begun.cancel()
            raise
        return begun


class _LockstepRun:
    """A stage on all ranks."""

    def __init__(self, number: int, own: StageRun, leader: Leader) -> None:
        self._number = number
        self._own = own
        self._leader = leader
        self._over = False

    @property
    def step(self) -> int:
        return self._own.step

    @property
    def steps(self) -> int:
        return self._own.steps

    def advance(self) -> StageResult | None:
        self._leader.tell(Advance(run=self._number))
        try:
            result = self._own.advance()
        except Exception as error:
            self._leader.settle(error)
            raise
        self._over = result is not None
        self._leader.settle(ended=self._over)
        if result is not None:
            _check(result)
        return result

    def cancel(self) -> None:
        self._own.cancel()
        if not self._over:
            self._over = True
            self._leader.tell(Drop(run=self._number))


class _StreamingRun(_LockstepRun):
    """One that may hand on frames as they are done, which is rank 0's affair."""

    def stream_to(self, deliver: Callable[[tuple[Clip, ...]], None]) -> None:
        assert isinstance(self._own, Streaming)
        self._own.stream_to(deliver)


class _ResumableRun(_LockstepRun):
    """One that can be saved and continued."""

    def announce(self, told: Callable[[], None]) -> None:
        if isinstance(self._own, Announcing):
            self._own.announce(told)

    def checkpoint(self) -> Frozen | None:
        assert isinstance(self._own, Resumable)
        return self._own.checkpoint()

    def restore(self, tree: bytes, tensors: Sequence[torch.Tensor]) -> None:
        assert isinstance(self._own, Resumable)
        self._own.restore(tree, tensors)
        self._leader.tell(Resume(run=self._number, saved=sent(tree, tensors)), tensors)
        _agree(self._leader.failure())


class _PreparableRun(_ResumableRun):
    """One that can also be brought up to its first step beside another one's."""

    def prepare(self) -> None:
        assert isinstance(self._own, Preparable)
        self._leader.tell(Prepare(run=self._number))
        try:
            try:
                self._own.prepare()
            finally:
                failed = self._leader.failure()
            _agree(failed)
        except Exception:
            self.cancel()
            raise


def _kind(own: StageRun) -> type[_LockstepRun]:
    """What can be done with a run."""
    if isinstance(own, Resumable):
        return _PreparableRun if isinstance(own, Preparable) else _ResumableRun
    return _StreamingRun if isinstance(own, Streaming) else _LockstepRun


def _agree(failed: StageError | None) -> None:
    """Raise what ranks have failed at while they exchanged nothing."""
    if failed is not None:
        raise failed


def _check(result: StageResult) -> None:
    """Raise `StageError` for what is not a number: no picture is made of what one rank has not got of another."""
    for output in result.outputs:
        if any(tensor.isnan().any() for tensor in output.tensors if tensor.is_floating_point()):
            raise StageError("the ranks made values that are not numbers")
