"""The roles of one classic pipeline, which has no modular blocks, at work by record and replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from triptych.accel.attention import backends
from triptych.errors import StageError, WireError
from triptych.ids import Role
from triptych.pipeline.anatomy import Anatomy
from triptych.pipeline.answers import OutputClasses, without_numbers
from triptych.pipeline.codec import decode_state, encode_state
from triptych.pipeline.decode import to_clips
from triptych.pipeline.guard import guarded
from triptych.pipeline.lora import Adapters
from triptych.pipeline.randomness import Randomness
from triptych.pipeline.recorder import RoleRun, Tape
from triptych.pipeline.replay_schema import call_arguments, guider_changes
from triptych.pipeline.request import complete
from triptych.pipeline.stage import StageOutput, StageResult, StageRun
from triptych.pipeline.suspended import suspendable
from triptych.wire.schema import RequestSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayModel:
    """What is known of the pipeline besides its weights."""

    anatomy: Anatomy
    classes: OutputClasses
    schema: RequestSchema
    fingerprint: str
    device: torch.device
    sharing: str = ""
    """How several GPUs share the work, in words."""


class ReplayRolePipeline:
    """`RolePipeline` of a classic pipeline. Roles of one process share weights, never state."""

    def __init__(
        self,
        *,
        model: ReplayModel,
        pipelines: dict[Role, Any],
        owned: dict[Role, frozenset[str]],
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters or Adapters((), ())
        self._pipelines = pipelines
        self._cast = {
            role: [
                (component, component.dtype)
                for component in (getattr(pipelines[role], name) for name in names)
                if hasattr(component, "decode")
            ]
            for role, names in owned.items()
        }

    @property
    def roles(self) -> tuple[Role, ...]:
        """Loaded roles in the order in which a request passes them."""
        return tuple(self._pipelines)

    @property
    def schema(self) -> RequestSchema:
        """What requests may say."""
        return self.model.schema

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints compute equal bytes."""
        return self.model.fingerprint

    @property
    def attention(self) -> dict[str, str]:
        """Each loaded denoiser model whose attention is dispatched, and the backend that it runs on."""
        if Role.DENOISER not in self._pipelines:
            return {}
        return backends({name: self.component(Role.DENOISER, name) for name in self.model.anatomy.denoisers})

    @property
    def sharing(self) -> str:
        """How several GPUs share the work, in words; empty for one."""
        return self.model.sharing

    def component(self, role: Role, name: str) -> Any:
        """A role's component, with weights or as a stand-in; None when it is absent."""
        return getattr(self._pipelines[role], name, None)

    def start(
        self,
        role: Role,
        params: Mapping[str, Any],
        inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]],
        images: Sequence[bytes],
    ) -> StageRun:
        """Begin a stage; see `RolePipeline.start`."""
        if role not in self._pipelines:
            raise StageError(f"the {role} is not loaded here, only {', '.join(self._pipelines)}", retryable=True)
        complete_params = complete(self.schema, params)
        with guarded(role):
            received = {} if role is Role.ENCODER else self._received(role, inputs)
            return _ReplayStage(self, role, complete_params, images, received)

    def run(
        self,
        role: Role,
        *,
        call: Mapping[str, Any],
        guidance: Mapping[str, Any],
        params: Mapping[str, Any],
        randomness: Randomness,
        tape: Tape,
    ) -> RoleRun:
        """A run of ``role`` that is ready to compute."""
        return RoleRun(
            role=role,
            pipeline=self._pipelines[role],
            anatomy=self.model.anatomy,
            classes=self.model.classes,
            call=call,
            guidance=guidance,
            params=params,
            randomness=randomness,
            tape=tape,
        )

    def settle(self, role: Role) -> None:
        """Cast back what a pipeline has cast for a while and, stopped in between, has left so."""
        for component, dtype in self._cast[role]:
            if component.dtype != dtype:
                component.to(dtype)

    def _received(self, role: Role, inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for tree, tensors in inputs:
            try:
                some, _ = decode_state(tree, tensors, self.model.device)
            except WireError as error:
                raise StageError(f"the {role}'s input cannot be read: {error.message}") from error
            values |= some
        needed = _NEEDS[role]
        if not needed <= values.keys():
            raise StageError(f"the {role}'s input lacks {', '.join(sorted(needed - values.keys()))}")
        return values


_NEEDS: dict[Role, frozenset[str]] = {
    Role.DENOISER: frozenset({"call", "seed", "answers"}),
    Role.DECODER: frozenset({"call", "seed", "answers", "predictions", "forms", "decode"}),
}
"""Entries that a role must have received."""


class _ReplayStage:
    """One stage of one request. The denoiser runs in a greenlet and stops between two steps; the others at once."""

    def __init__(
        self,
        owner: ReplayRolePipeline,
        role: Role,
        params: Mapping[str, Any],
        images: Sequence[bytes],
        received: dict[str, Any],
    ) -> None:
        self._owner = owner
        self._role = role
        self._fps = float(params.get("fps", 0))
        self._adapters = owner.adapters.read(params)
        if role is Role.ENCODER:
            self._call, self._seed = call_arguments(owner.model.anatomy, params, images)
        else:
            self._call, self._seed = received["call"], received["seed"]
        tape = Tape(
            answers=[tuple(entry) for entry in received.get("answers", ())],
            predictions=[tuple(entry) for entry in received.get("predictions", ())],
            forms=received.get("forms", []),
            decode=received.get("decode"),
        )
        self._randomness = Randomness(self._seed, owner.model.device)
        self._run = owner.run(
            role,
            call=self._call,
            guidance=guider_changes(owner.model.anatomy, params),
            params=params,
            randomness=self._randomness,
            tape=tape,
        )
        self._greenlet: greenlet | None = suspendable(self._run.compute)

    @property
    def step(self) -> int:
        return self._run.step if self._role is Role.DENOISER else 0

    @property
    def steps(self) -> int:
        return self._run.steps if self._role is Role.DENOISER else 0

    def advance(self) -> StageResult | None:
        """Up to the next step boundary; see `StageRun.advance`."""
        with guarded(self._role):
            running = self._greenlet
            if running is None:
                raise StageError(f"the {self._role} run is over")
            running.parent = getcurrent()
            self._owner.adapters.choose(self._adapters)
            try:
                with self._randomness.installed():
                    result = running.switch()
            finally:
                if running.dead:
                    self._greenlet = None
                    self._run.let_go()
                    self._owner.settle(self._role)
            return self._result(result) if running.dead else None

    def announce(self, told: Callable[[], None]) -> None:
        """See `Announcing`; of a denoiser."""
        self._run.computes = told

    def cancel(self) -> None:
        """Unwind the pipeline by GreenletExit, which none catches, and drop all that it held."""
        running, self._greenlet = self._greenlet, None
        if running is not None and not running.dead:
            running.parent = getcurrent()
            running.throw()
        self._run.let_go()

    def _result(self, batch: Any) -> StageResult:
        tape = self._run.tape
        match self._role:
            case Role.ENCODER:
                full = [list(entry) for entry in tape.answers]
                light = [[key, without_numbers(plain, floats_only=True), states] for key, plain, states in tape.answers]
                outputs = (self._handed(Role.DENOISER, full), self._handed(Role.DECODER, light))
                return StageResult(outputs=outputs)
            case Role.DENOISER:
                entries = {
                    "predictions": [list(entry) for entry in tape.predictions],
                    "forms": tape.forms,
                    "decode": tape.decode,
                }
                tree, tensors = encode_state(entries, {})
                return StageResult(outputs=(StageOutput(consumer=Role.DECODER, tree=tree, tensors=tensors),))
            case Role.DECODER:
                name = "videos" if self._owner.schema.output == "video" else "images"
                return StageResult(clips=to_clips({name: batch}, fps=self._fps))

    def _handed(self, consumer: Role, answers: list[Any]) -> StageOutput:
        tree, tensors = encode_state({"call": self._call, "seed": self._seed, "answers": answers}, {})
        return StageOutput(consumer=consumer, tree=tree, tensors=tensors)
