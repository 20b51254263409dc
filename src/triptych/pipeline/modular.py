"""The roles of one cut pipeline at work: starts stages and carries state across the cut through the codec."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triptych.accel.attention import backends
from triptych.accel.batching import Call, ForwardBatcher, Kind
from triptych.accel.companions import Companions, companions
from triptych.accel.guiders import FloatPredictions, GuiderShare, watched
from triptych.accel.unipc import unhurried
from triptych.errors import StageError, WireError
from triptych.ids import Role
from triptych.pipeline.codec import decode_state, encode_state
from triptych.pipeline.cut import Cut
from triptych.pipeline.families import Family
from triptych.pipeline.guard import guarded
from triptych.pipeline.lora import Adapters
from triptych.pipeline.modular_stages import DecodeStage, DenoiseStage, WholeStage, seed_of
from triptych.pipeline.preview import Projection
from triptych.pipeline.randomness import GlobalRandomness
from triptych.pipeline.request import complete, first_state, guider_settings
from triptych.pipeline.shift import shifted
from triptych.pipeline.stage import StageOutput, StageResult, StageRun
from triptych.pipeline.steps import StepClock, SteppedBlock, exact_timestep, refuse_while_preparing
from triptych.pipeline.together import Once, advance_together
from triptych.wire.schema import RequestSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRole:
    """One part with its components: its own with weights, all others as stand-ins."""

    role: Role
    pipeline: Any
    blocks: Any


class ModularRolePipeline:
    """`RolePipeline` of a Diffusers modular pipeline. Roles of one process share weights, never state."""

    def __init__(
        self,
        *,
        loaded: dict[Role, LoadedRole],
        cut: Cut,
        family: Family,
        schema: RequestSchema,
        fingerprint: str,
        device: torch.device,
        clock: StepClock | None = None,
        batcher: ForwardBatcher | None = None,
        shared: GuiderShare | None = None,
        adapters: Adapters | None = None,
        projection: Projection | None = None,
        sharing: str = "",
        prepares: bool = False,
    ) -> None:
        """``prepares``: whether runs may be prepared beside others, as the denoiser's weights stay where they are."""
        self._loaded = loaded
        self._cut = cut
        self._family = family
        self._schema = schema
        self._fingerprint = fingerprint
        self._device = device
        self._clock = clock or StepClock()
        self._batcher = batcher
        self._shared = shared
        self.adapters = adapters or Adapters((), ())
        self.projection = projection
        self.sharing = sharing
        self.prepares = prepares and Role.DENOISER in loaded
        if self.prepares:
            for component in loaded[Role.DENOISER].pipeline.components.values():
                if isinstance(component, torch.nn.Module):
                    refuse_while_preparing(component, self._clock)
        if family.exact_timestep and Role.DENOISER in loaded:
            for name, component in loaded[Role.DENOISER].pipeline.components.items():
                if isinstance(component, torch.nn.Module) and name.startswith("transformer"):
                    exact_timestep(component, self._clock, family.exact_timestep)

    def with_parts(self, loaded: dict[Role, LoadedRole]) -> ModularRolePipeline:
        """The same model with other parts."""
        return ModularRolePipeline(
            loaded=loaded,
            cut=self._cut,
            family=self._family,
            schema=self._schema,
            fingerprint=self._fingerprint,
            device=self._device,
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """Loaded roles in the order in which a request passes them."""
        return tuple(self._loaded)

    @property
    def schema(self) -> RequestSchema:
        """What requests may say."""
        return self._schema

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints compute equal bytes."""
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def family(self) -> Family:
        """What is particular to the model's pipeline class."""
        return self._family

    @property
    def cut(self) -> Cut:
        """The parts and what crosses between them."""
        return self._cut

    @property
    def joins(self) -> bool:
        """Whether forwards of several requests are joined."""
        return self._batcher is not None

    def companions(self, runs: Sequence[StageRun], turn: int) -> Companions:
        """Who advances with whom; see `Together`. Encodings, of one step each, all do."""
        assert self._batcher is not None
        return companions([run.called if isinstance(run, DenoiseStage) else () for run in runs], turn, self._batcher)

    def advance_together(self, runs: Sequence[StageRun]) -> list[StageResult | Exception | None]:
        """One step of several denoising runs, or several encodings; see `Together`."""
        assert self._batcher is not None
        stages = [run for run in runs if isinstance(run, DenoiseStage)]
        if not stages:
            wholes = [run for run in runs if isinstance(run, WholeStage)]
            assert len(wholes) == len(runs)
            once = [Once(whole.compute, whole.randomness) for whole in wholes]
            return advance_together(Role.ENCODER, once, self._batcher)
        assert len(stages) == len(runs)
        calls: list[list[Kind]] = [[] for _ in stages]

        def called(number: int, call: Call) -> None:
            calls[number].append(call.kind)

        states = advance_together(Role.DENOISER, [stage.stepped for stage in stages], self._batcher, called)
        for stage, kinds in zip(stages, calls, strict=True):
            stage.called = tuple(kinds)
        return [state if state is None or isinstance(state, Exception) else self.denoised(state) for state in states]

    def denoised(self, state: Any) -> StageResult:
        """What a finished denoising run hands on."""
        return StageResult(outputs=self.outputs(Role.DENOISER, state))

    def pipeline(self, role: Role) -> Any:
        """A role's Diffusers pipeline."""
        return self._loaded[role].pipeline

    @property
    def attention(self) -> dict[str, str]:
        """Each loaded denoiser model whose attention is dispatched, and the backend that it runs on."""
        if Role.DENOISER not in self._loaded:
            return {}
        return backends(self.pipeline(Role.DENOISER).components)

    def component(self, role: Role, name: str) -> Any:
        """A role's component as its blocks see it; None when it is absent."""
        return getattr(self._loaded[role].pipeline, name, None)

    def start(
        self,
        role: Role,
        params: Mapping[str, Any],
        inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]],
        images: Sequence[bytes],
    ) -> StageRun:
        """Begin a stage; see `RolePipeline.start`."""
        if role not in self._loaded:
            raise StageError(f"the {role} is not loaded here, only {', '.join(self._loaded)}", retryable=True)
        complete_params = complete(self._schema, params)
        if complete_params.get("negative_prompt") is None and self._family.negative_prompt is not None:
            complete_params["negative_prompt"] = self._family.negative_prompt
        with guarded(role):
            return self._start(role, complete_params, inputs, images)

    def _start(
        self,
        role: Role,
        params: dict[str, Any],
        inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]],
        images: Sequence[bytes],
    ) -> StageRun:
        loaded = self._loaded[role]
        view = request_view(loaded.pipeline, self._family, params, encoder=role is Role.ENCODER)
        if role is Role.ENCODER:
            first = first_state(self._cut.inputs, params, images, self._family)
            return WholeStage(self, role, view, _state(first, {}), params)
        state = self._received(role, inputs)
        if role is Role.DENOISER:
            if self._shared is not None:
                _share_guiders(view, self._shared)
            randomness = GlobalRandomness(seed_of(params, state), self._device)
            return DenoiseStage(self, SteppedBlock(view, loaded.blocks, state, self._clock, randomness), params)
        return DecodeStage(self, role, view, state, params, streams=self._family.streams)

    def _received(self, role: Role, inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]]) -> Any:
        if not inputs:
            raise StageError(f"the {role} got no input")
        values: dict[str, Any] = {}
        kwargs_types: dict[str, list[str]] = {}
        for tree, tensors in inputs:
            try:
                some, types = decode_state(tree, tensors, self._device)
            except WireError as error:
                raise StageError(f"the {role}'s input cannot be read: {error.message}") from error
            if twice := values.keys() & some.keys():
                raise StageError(f"the {role} got {', '.join(sorted(twice))} twice")
            values |= some
            for name, keys in types.items():
                kwargs_types.setdefault(name, []).extend(keys)
        return _state(values, kwargs_types)

    def outputs(self, role: Role, state: Any) -> tuple[StageOutput, ...]:
        """What a finished stage hands on.

        Everything travels down the chain, except tensors that only the decoder reads and the denoiser leaves alone:
        those go to the decoder directly.
        """
        values = {key: value for key, value in state.values.items() if value is not None}
        types: dict[str, list[str]] = state.kwargs_mapping
        for_decoder = values.keys() & self._cut.needs[Role.DECODER].of(types)
        if role is Role.DENOISER:
            return (_output(Role.DECODER, values, for_decoder, types),)
        for_denoiser = values.keys() & self._cut.needs[Role.DENOISER].of(types)
        past = {
            key
            for key in for_decoder - for_denoiser - self._cut.denoiser_writes
            if isinstance(values[key], (torch.Tensor, list, tuple))
        }
        chain = _output(Role.DENOISER, values, (for_denoiser | for_decoder) - past, types)
        return (chain, _output(Role.DECODER, values, past, types)) if past else (chain,)

    def blocks(self, role: Role) -> Any:
        """A role's part."""
        return self._loaded[role].blocks


def request_view(pipeline: Any, family: Family, params: Mapping[str, Any], *, encoder: bool) -> Any:
    """A shallow copy of a role's pipeline for one request: weights shared; schedulers and guiders its own."""
    view = copy.copy(pipeline)
    for name, component in pipeline.components.items():
        if component is None or isinstance(component, torch.nn.Module):
            continue
        if hasattr(component, "set_timesteps"):
            setattr(view, name, unhurried(shifted(copy.deepcopy(component), params)))
        elif hasattr(component, "prepare_models"):
            guider = component.new(**guider_settings(family, params, name, encoder=encoder))
            setattr(view, name, watched(guider, FloatPredictions()) if family.float_predictions else guider)
    return view


def _share_guiders(view: Any, shared: GuiderShare) -> None:
    """Have the guiders of a request's view make their branches as ``shared`` does."""
    for name, component in view.components.items():
        if hasattr(component, "prepare_models"):
            setattr(view, name, shared.guider(component))


def _state(values: dict[str, Any], kwargs_types: dict[str, list[str]]) -> Any:
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    return PipelineState(values=values, kwargs_mapping=kwargs_types)


def _output(consumer: Role, values: dict[str, Any], keys: set[str], types: dict[str, list[str]]) -> StageOutput:
    kept = {name: [key for key in dict.fromkeys(filed) if key in keys] for name, filed in types.items()}
    tree, tensors = encode_state({key: values[key] for key in sorted(keys)}, kept)
    return StageOutput(consumer=consumer, tree=tree, tensors=tensors)
