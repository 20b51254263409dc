"""Step control: run an unmodified denoise block and stop between two steps.

The denoise loops differ by family in what stands before, between and after the steps, so they are not rewritten. The
block runs in a greenlet; its loops' ``loop_step`` is wrapped, on a private copy of the block tree, to switch back to
the caller before every step but the first. Where the loop goes over chunks of a video instead, each with all of its
steps, the request's own guider, which is told of every step, does so. A stopped run is a suspended greenlet and nothing
else. A run that resumes
from a checkpoint passes over the steps that were done and then takes over what they had changed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from triptych.accel.batching import Call
from triptych.accel.guiders import changes_model
from triptych.accel.step_cache import FIELD, StepMemory
from triptych.errors import StageError
from triptych.pipeline.checkpoint import Baseline, Frozen, Saved, Unsaved
from triptych.pipeline.cut import walk
from triptych.pipeline.families import ExactTimestep
from triptych.pipeline.names import STAGE_STEPS
from triptych.pipeline.randomness import GlobalRandomness
from triptych.pipeline.suspended import answered, suspendable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepClock:
    """What models may know of the step being computed; one per loaded denoiser. `exact_timestep` reads the timestep."""

    timestep: torch.Tensor | None = None
    memory: StepMemory = field(default_factory=StepMemory)
    """What the steps of the request being computed leave for the next ones, where step caching is on."""
    preparing: bool = False
    """Whether a run is being prepared beside the step of another one, so that models must not be called."""

    def begin(self, timestep: Any, state: Any) -> None:
        """A step of a loop with this ``state`` begins."""
        self.timestep = timestep
        self.memory.enter(state)

    def end(self) -> None:
        """The step that is being computed breaks off. Other runs say what they need when they go on."""
        self.timestep = None
        self.memory.leave()


class SteppedBlock:
    """One run of a block: `advance` computes one step of its loop, `cancel` unwinds it.

    Must be used from one thread. The caller has turned gradients off in it: grad mode belongs to the thread, and a
    greenlet that switches inside ``no_grad`` would otherwise leave it to the others.
    """

    def __init__(self, pipeline: Any, block: Any, state: Any, clock: StepClock, randomness: GlobalRandomness) -> None:
        self.step = 0
        self.steps = 0
        self._clock = clock
        self._randomness = randomness
        """What schedulers draw from that are given no generator."""
        self._begun = 0
        self._baseline: Baseline | None = None
        self._here: tuple[Any, Any] | None = None
        """Components and block state of the loop, while it stands before a step."""
        self._timestep: Any = None
        """Of the step that is being computed; None between steps."""
        self._saved: Saved | None = None
        self.computes: Callable[[], None] | None = None
        """Called when the first step is about to be computed."""
        self._pipeline: Any = pipeline
        self._state: Any = state
        block = copy.deepcopy(block)
        self._wrapped: list[tuple[Any, str]] = []
        """Objects of this run with a method that leads back to the run, and so to all that it holds."""
        for loop in loops(block):
            loop.set_progress_bar_config(disable=True)
            self._wrap(loop, "loop_step", self._stopping(loop.loop_step))
        self._greenlet: greenlet | None = suspendable(lambda: block(pipeline, state)[1])

    def advance(self) -> Any | None:
        """One step more; the final state after the last one, else None. What the block raises comes through.

        While calls of the model are collected, a `Call` that must be computed before the step can go on.
        Raises `StageError` when the run is over.
        """
        return self._switch(lambda run: run.switch())

    def prepare(self) -> None:
        """Do what comes before the first step and stop there. Raises what the block raises, and `StageError` for one
        that computes before its first step; the run is over then."""
        self._clock.preparing = True
        try:
            self._switch(lambda run: run.switch())
        finally:
            self._clock.preparing = False
        if self._greenlet is None:
            raise StageError("this loop has no step to stop before")

    def resume(self, call: Call) -> Any | None:
        """Go on with a step that came to ``call``, which has been computed; returns what `advance` would."""
        if self._timestep is not None:
            self._clock.timestep = self._timestep  # other runs have computed meanwhile
        return self._switch(lambda run: answered(run, call))

    def _switch(self, into: Callable[[greenlet], Any]) -> Any | None:
        run = self._greenlet
        if run is None:
            raise StageError("the denoiser run is over")
        run.parent = getcurrent()
        try:
            with self._randomness.installed():
                outcome = into(run)
        finally:
            if run.dead:
                self._let_go()
        if run.dead:
            self.step = self._begun
        return outcome if run.dead or isinstance(outcome, Call) else None

    def checkpoint(self) -> Frozen | None:
        """What has to be kept to go on from here, copied; None where that cannot be had: before the first step, after
        the last one, in loops over chunks, and when the steps have changed something that cannot cross."""
        if self._here is None or self._baseline is None:
            return None
        try:
            return self._baseline.capture(*self._here, self.step, self.steps)
        except Unsaved as error:
            log.warning("no checkpoint: %s", error)
            self._baseline = None
            return None

    @property
    def latents(self) -> torch.Tensor | None:
        """What the loop has made so far; None unless it stands between two steps."""
        latents = None if self._here is None else getattr(self._here[1], "latents", None)
        return latents if isinstance(latents, torch.Tensor) else None

    def value(self, name: str) -> Any:
        """What the blocks so far have put under ``name``; None for nothing."""
        return None if self._state is None else self._state.get(name)

    def restore(self, saved: Saved) -> None:
        """Go on from ``saved`` instead of from the beginning; to be called before the first `advance`."""
        if self._begun:
            raise StageError("a run that has begun cannot be restored")
        self._saved = saved
        self.step, self.steps = saved.step, saved.steps

    def cancel(self) -> None:
        """Unwind the block by GreenletExit, which no block catches, and drop all that it held."""
        run = self._greenlet
        if run is not None and not run.dead:
            run.parent = getcurrent()
            run.throw()
        self._let_go()

    def _let_go(self) -> None:
        """Drop all that the run held, at once rather than when Python next looks for cycles."""
        self.computes = None
        if self._timestep is not None:  # it ended within a step
            self._clock.end()
            self._put_right()
        self._greenlet = self._here = self._timestep = None
        self._baseline = self._saved = self._pipeline = self._state = None
        while self._wrapped:
            owner, name = self._wrapped.pop()
            delattr(owner, name)

    def _put_right(self) -> None:
        """Undo what the request's guiders may have done to the models for the branch that was computed."""
        components = self._pipeline.components
        for guider in filter(changes_model, components.values()):
            for name, model in components.items():
                if isinstance(model, torch.nn.Module) and name.startswith("transformer"):
                    guider.cleanup_models(model)

    def _wrap(self, owner: Any, name: str, method: Any) -> None:
        """Let ``owner.name`` be another until the run is over."""
        setattr(owner, name, method)
        self._wrapped.append((owner, name))

    def _stopping(self, compute: Any) -> Any:
        def loop_step(components: Any, block_state: Any, **arguments: Any) -> Any:
            if "t" not in arguments:
                return self._chunk(compute, components, block_state, arguments)
            index, self._begun = self._begun, self._begun + 1
            if index == 0:
                self._enter(components, block_state, arguments)
                self._wait_for_turn()
            elif arguments.get("i") != index:
                self._baseline = None  # the steps of another loop: they have no one order
            if self._saved is not None:
                if index < self._saved.step:
                    return components, block_state
                self._saved.restore(components, block_state, self._randomness)
                self._saved = None
            elif index:
                self._here = components, block_state
                _to_caller()
                self._here = None
            self._begin_step(arguments.get("t"), block_state)
            result = compute(components, block_state, **arguments)
            self._timestep = None
            self._clock.memory.leave()
            self.step += 1
            return result

        return loop_step

    def _wait_for_turn(self) -> None:
        """Stop before the first step, where that is all that was asked for."""
        if self._clock.preparing:
            _to_caller()

    def _begin_step(self, timestep: Any, block_state: Any) -> None:
        self._timestep = timestep
        self._clock.begin(timestep, block_state)
        computes, self.computes = self.computes, None
        if computes is not None:
            computes()

    def _chunk(self, compute: Any, components: Any, block_state: Any, arguments: dict[str, Any]) -> Any:
        """One round of a loop over chunks. It has no checkpoints: what a chunk has done lies in its own variables."""
        if self._saved is not None:
            raise StageError("a loop over chunks cannot resume from a checkpoint", retryable=True)
        if self._begun == 0:
            self.steps = _chunks(block_state) * _length(block_state)
            self._follow(self._pipeline.guider, block_state)
        if self._clock.memory.wanted:
            setattr(block_state, FIELD, {})  # the last step of one chunk says nothing of the first of the next
        return compute(components, block_state, **arguments)

    def _follow(self, guider: Any, block_state: Any) -> None:
        """Stop where ``guider``, the request's own, is told that a step begins."""
        told = guider.set_state

        def set_state(*args: Any, timestep: Any, **more: Any) -> None:
            if self._begun:
                self.step += 1
                self._timestep = None
                self._clock.memory.leave()
                _to_caller()
            else:
                self._wait_for_turn()
            self._begun += 1
            self._begin_step(timestep, block_state)
            told(*args, timestep=timestep, **more)

        self._wrap(guider, "set_state", set_state)

    def _enter(self, components: Any, block_state: Any, arguments: dict[str, Any]) -> None:
        """Look at the state before the first step, if this is a loop over steps."""
        self.steps = _length(block_state)
        if self._clock.memory.wanted:
            setattr(block_state, FIELD, {})
        if arguments.get("i") == 0:
            try:
                self._baseline = Baseline(components, block_state, self._randomness)
            except Unsaved as error:
                log.warning("no checkpoints: %s", error)
        if self._saved is not None and (self._baseline is None or self.steps != self._saved.steps):
            raise StageError(f"this loop of {self.steps} steps cannot resume from the checkpoint", retryable=True)


def loops(block: Any) -> list[Any]:
    """The step loops in a block tree."""
    from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

    return [part for part in walk(block) if isinstance(part, LoopSequentialPipelineBlocks)]


def refuse_while_preparing(model: torch.nn.Module, clock: StepClock) -> None:
    """Have calls of ``model`` raise `StageError` while a run is prepared beside the step of another one."""

    def refuse(*_: Any) -> None:
        if clock.preparing:
            raise StageError("the model is called before the first step")

    model.register_forward_pre_hook(refuse)


def exact_timestep(transformer: torch.nn.Module, clock: StepClock, told: ExactTimestep) -> None:
    """Give ``transformer`` the scheduler's own timestep, for each sample, instead of one rounded to the weights'
    dtype."""

    def restore(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rounded = kwargs.get(told.argument)
        if clock.timestep is not None and rounded is not None and rounded.ndim == 1:
            exact = (1000 - clock.timestep) / 1000 if told.done else clock.timestep
            kwargs = {**kwargs, told.argument: exact.expand(rounded.shape)}
        return args, kwargs

    transformer.register_forward_pre_hook(restore, with_kwargs=True)


def _to_caller() -> None:
    caller = getcurrent().parent
    assert caller is not None
    caller.switch()


def _length(block_state: Any) -> int:
    stages = getattr(block_state, STAGE_STEPS, None)
    if stages is not None:
        return sum(stages)
    timesteps = getattr(block_state, "timesteps", None)
    return len(timesteps) if timesteps is not None else getattr(block_state, "num_inference_steps", 0)


def _chunks(block_state: Any) -> int:
    return getattr(block_state, "num_latent_chunk", 1)
