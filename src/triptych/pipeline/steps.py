"""Step control: run an unmodified denoise block and stop between two steps.

The denoise loops differ by family in what stands before, between and after the steps, so they are not rewritten. The
block runs in a greenlet; its loops' ``loop_step`` is wrapped, on a private copy of the block tree, to switch back to
the caller before every step but the first. A stopped run is a suspended greenlet and nothing else.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from triptych.errors import StageError
from triptych.pipeline.cut import walk


@dataclass(slots=True)
class StepClock:
    """The scheduler's timestep of the step being computed; one per loaded denoiser, read by `exact_timestep`."""

    timestep: torch.Tensor | None = None


class SteppedBlock:
    """One run of a block: `advance` computes one step of its loop, `cancel` unwinds it.

    Must be used from one thread. The caller has turned gradients off in it: grad mode belongs to the thread, and a
    greenlet that switches inside ``no_grad`` would otherwise leave it to the others.
    """

    def __init__(self, pipeline: Any, block: Any, state: Any, clock: StepClock) -> None:
        self.step = 0
        self.steps = 0
        self._clock = clock
        self._begun = 0
        block = copy.deepcopy(block)
        for loop in loops(block):
            loop.set_progress_bar_config(disable=True)
            loop.loop_step = self._stopping(loop)
        self._greenlet: greenlet | None = greenlet(lambda: block(pipeline, state)[1])

    def advance(self) -> Any | None:
        """One step more; the final state after the last one, else None. What the block raises comes through.

        Raises `StageError` when the run is over.
        """
        run = self._greenlet
        if run is None:
            raise StageError("the denoiser run is over")
        run.parent = getcurrent()
        try:
            state = run.switch()
        finally:
            if run.dead:
                self._greenlet = None
        return state if run.dead else None

    def cancel(self) -> None:
        """Unwind the block by GreenletExit, which no block catches, and drop all that it held."""
        run, self._greenlet = self._greenlet, None
        if run is not None and not run.dead:
            run.parent = getcurrent()
            run.throw()

    def _stopping(self, loop: Any) -> Any:
        compute = loop.loop_step

        def loop_step(components: Any, block_state: Any, **arguments: Any) -> Any:
            self.steps = _length(block_state)
            if self._begun:
                caller = getcurrent().parent
                assert caller is not None
                caller.switch()
            self._begun += 1
            self._clock.timestep = arguments.get("t")
            result = compute(components, block_state, **arguments)
            self.step += 1
            return result

        return loop_step


def loops(block: Any) -> list[Any]:
    """The step loops in a block tree."""
    from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

    return [part for part in walk(block) if isinstance(part, LoopSequentialPipelineBlocks)]


def exact_timestep(transformer: torch.nn.Module, clock: StepClock) -> None:
    """Give ``transformer`` the scheduler's own timestep instead of one rounded to the weights' dtype."""

    def restore(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if clock.timestep is not None and "timestep" in kwargs:
            kwargs = {**kwargs, "timestep": clock.timestep.expand(kwargs["timestep"].shape)}
        return args, kwargs

    transformer.register_forward_pre_hook(restore, with_kwargs=True)


def _length(block_state: Any) -> int:
    timesteps = getattr(block_state, "timesteps", None)
    return len(timesteps) if timesteps is not None else getattr(block_state, "num_inference_steps", 0)
