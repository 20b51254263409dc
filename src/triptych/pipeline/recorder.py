"""One run of a classic pipeline's ``__call__`` in one role: own components compute, others answer from a record.

The encoder records what text, image and VAE encoders answer and stops at the first denoiser call. The denoiser
replays these answers, runs the denoisers, and stops where latents would be decoded. The decoder replays too, with zeros
for what the denoisers gave, and decodes the latents that it was sent. All three take the same path through the code,
for they start from the same arguments and random states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent

from triptych.accel.unipc import unhurried
from triptych.errors import StageError
from triptych.ids import Role
from triptych.pipeline.anatomy import FIELDS, Anatomy
from triptych.pipeline.answers import OutputClasses, Reader, ReadTuple, without_numbers
from triptych.pipeline.randomness import Randomness, States
from triptych.pipeline.shadows import encoder_shadow, replaced, shadow
from triptych.pipeline.shift import shifted

Method = Callable[..., Any]


class Stop(BaseException):
    """Ends a run where its role ends. No pipeline catches a `BaseException`."""


@dataclass(kw_only=True, slots=True)
class Tape:
    """What one role has recorded for the next ones."""

    answers: list[tuple[str, Any, States]] = field(default_factory=list[tuple[str, Any, States]])
    """Method, answer in plain form, and the random states that the call changed."""
    predictions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Denoiser component, and the place of its output's form in ``forms``; one a call."""
    forms: list[Any] = field(default_factory=list[Any])
    """Distinct plain forms of denoiser outputs, shapes only."""
    decode: tuple[Any, Any] | None = None
    """Positional and keyword arguments of the decode call in plain form."""


class RoleRun:
    """Everything of one run that is not shared: the view of the pipeline, the tape, the random states, the steps."""

    def __init__(
        self,
        *,
        role: Role,
        pipeline: Any,
        anatomy: Anatomy,
        classes: OutputClasses,
        call: Mapping[str, Any],
        guidance: Mapping[str, Any],
        params: Mapping[str, Any],
        randomness: Randomness,
        tape: Tape,
    ) -> None:
        self.step = 0
        self.steps = 0
        self.tape = tape
        self._role = role
        self._anatomy = anatomy
        self._classes = classes
        self._call = call
        self._guidance = guidance
        self._params = params
        self._randomness = randomness
        self._recorded: list[tuple[str, Any, States]] = []
        self._answered = 0
        self._predicted = 0
        self._stepped = False
        self._decoded = False
        self.computes: Callable[[], None] | None = None
        """Called when a denoiser is about to compute for the first time."""
        self._replaced: list[tuple[Any, str]] = []
        self._view: Any = self._viewed(pipeline)

    def compute(self) -> Any:
        """Run the role's part. The decoder's result is a batch of videos or images, that of the others is the tape."""
        try:
            result = self._view(**self._call, generator=self._randomness.generator)
        except Stop:
            self._finish()
            return None
        if self._role is not Role.DECODER or not self._decoded:
            raise StageError(f"the pipeline ended before the {self._role} had its part")
        return next(batch for name in FIELDS if (batch := getattr(result, name, None)) is not None)

    def let_go(self) -> None:
        """Drop all that the run held but the tape, at once rather than when Python next looks for cycles."""
        self._view = self.computes = None
        while self._replaced:
            owner, method = self._replaced.pop()
            vars(owner).pop(method, None)

    def _replace(self, made: Any, module: Any, method: str, does: Method) -> None:
        """`replaced` until the run is over: what is done instead leads back to ``made`` and to this run."""
        replaced(made, module, method, does)
        self._replaced.append((made, method))

    def _finish(self) -> None:
        if self._role is Role.ENCODER:
            self.tape.answers = [(key, self._classes.flat(kept), states) for key, kept, states in self._recorded]

    # -- the view -------------------------------------------------------------------------------------------------

    def _viewed(self, pipeline: Any) -> Any:
        view = copy.copy(pipeline)
        for name, component in pipeline.components.items():
            if isinstance(component, torch.nn.Module):
                view.__dict__[name] = self._component(name, component)
            elif hasattr(component, "set_timesteps"):
                view.__dict__[name] = self._scheduler(unhurried(shifted(copy.deepcopy(component), self._params)))
            elif hasattr(component, "prepare_models"):
                view.__dict__[name] = component.new(**self._guidance)
        if self._anatomy.decoder is None and self._role is not Role.ENCODER:
            method = self._anatomy.decode
            self._replace(view, view, method, self._decode(getattr(view, method)))
        return view

    def _component(self, name: str, component: torch.nn.Module) -> Any:
        if name in self._anatomy.denoisers:
            made = shadow(component)
            self._replace(made, component, "forward", self._denoiser(name, component))
            return made
        if name in self._anatomy.inspectors:
            return shadow(component)
        wrap = self._record if self._role is Role.ENCODER else self._replay
        decodes = hasattr(component, "decode")
        # An autoencoder's parts also serve its decode, which is not replayed.
        made = encoder_shadow(component, name, wrap, depth=0 if decodes else 2)
        if name == self._anatomy.decoder and self._role is not Role.ENCODER:
            self._replace(made, component, "decode", self._decode(made.decode))
        return made

    def _scheduler(self, scheduler: Any) -> Any:
        real = scheduler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            self.steps = getattr(self._view, "_num_timesteps", None) or len(scheduler.timesteps)
            self.step += not self._stepped
            self._stepped = True
            return result

        self._replace(scheduler, scheduler, "step", step)
        return scheduler

    # -- encoders -------------------------------------------------------------------------------------------------

    def _record(self, key: str, real: Method) -> Method:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._randomness.states()
            answer = real(*args, **kwargs)
            given = self._classes.noted(answer)
            kept = given if isinstance(given, (Reader, ReadTuple)) else answer
            self._recorded.append((key, kept, self._randomness.changed(before)))
            # The pipeline may change what it gets in place.
            return given.clone() if isinstance(given, torch.Tensor) else given

        return run

    def _replay(self, key: str, _: Method) -> Method:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._answered == len(self.tape.answers):
                raise StageError(f"the {self._role} asks {key} for an answer that the encoder has not recorded")
            recorded, plain, states = self.tape.answers[self._answered]
            if recorded != key:
                raise StageError(f"the {self._role} asks {key} where the encoder had asked {recorded}")
            self._answered += 1
            self._randomness.advance(states)
            return self._classes.rebuilt(plain)

        return run

    # -- denoisers ------------------------------------------------------------------------------------------------

    def _denoiser(self, name: str, component: torch.nn.Module) -> Method:
        match self._role:
            case Role.ENCODER:
                return lambda *_, **__: _stop()
            case Role.DENOISER:
                return self._predict(name, component)
            case Role.DECODER:
                return self._zeros(name)

    def _predict(self, name: str, component: torch.nn.Module) -> Method:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._end_step()
            computes, self.computes = self.computes, None
            if computes is not None:
                computes()
            output = component(*args, **kwargs)
            form = without_numbers(self._classes.flat(output), floats_only=False)
            if form not in self.tape.forms:
                self.tape.forms.append(form)
            self.tape.predictions.append((name, self.tape.forms.index(form)))
            return output

        return run

    def _end_step(self) -> None:
        """Between a scheduler's step and the next prediction, give the caller the word."""
        if self._stepped:
            self._stepped = False
            caller = getcurrent().parent
            assert caller is not None
            caller.switch()

    def _zeros(self, name: str) -> Method:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._predicted == len(self.tape.predictions):
                raise StageError(f"the decoder asks {name} for an output that the denoiser has not noted")
            noted, form = self.tape.predictions[self._predicted]
            if noted != name:
                raise StageError(f"the decoder asks {name} where the denoiser had asked {noted}")
            self._predicted += 1
            return self._classes.rebuilt(self.tape.forms[form])

        return run

    # -- decode ---------------------------------------------------------------------------------------------------

    def _decode(self, real: Method) -> Method:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._role is Role.DENOISER:
                self.tape.decode = (self._classes.flat(args), self._classes.flat(kwargs))
                raise Stop
            if self._decoded or self.tape.decode is None:
                raise StageError(f"the pipeline calls {self._anatomy.decode} more than once")
            self._decoded = True
            sent, named = self.tape.decode
            return real(*self._classes.rebuilt(sent), **self._classes.rebuilt(named))

        return run


def _stop() -> Any:
    raise Stop
