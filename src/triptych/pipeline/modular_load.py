"""Load the roles of a modular pipeline: cut at its blocks, with their weights and stand-ins for those of others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import msgspec

from triptych.accel.batching import MOST_AT_ONCE, ForwardBatcher
from triptych.accel.branches import BranchBatching
from triptych.accel.guiders import changes_model
from triptych.config import ModelConfig
from triptych.errors import ConfigError, ModelError
from triptych.ids import ROLES, Role
from triptych.pipeline.cut import cut
from triptych.pipeline.drawing import draw_elsewhere
from triptych.pipeline.families import family_of
from triptych.pipeline.fingerprint import fingerprint, weights_of
from triptych.pipeline.known import modular_counterpart, whether_picture
from triptych.pipeline.loading import Loading, WarmUp
from triptych.pipeline.lora import attach, identities, with_adapters
from triptych.pipeline.modular import LoadedRole, ModularRolePipeline
from triptych.pipeline.names import CHUNK
from triptych.pipeline.outfit import modules_of, outfit
from triptych.pipeline.passing import exchange, instruct, pass_on
from triptych.pipeline.preview import fit, with_previews
from triptych.pipeline.readahead import read_ahead
from triptych.pipeline.rehearsal import ghosts, rehearse
from triptych.pipeline.request import guidance_is_off, with_defaults
from triptych.pipeline.schema import build_schema, read_settings
from triptych.pipeline.sharing import Shares
from triptych.pipeline.source import index_components, resolve_source
from triptych.pipeline.stage import RolePipeline
from triptych.pipeline.standin import stand_in
from triptych.pipeline.steps import StepClock
from triptych.pipeline.ways import is_guided
from triptych.wire.schema import RequestSchema


def load_modular(loading: Loading, folder: Path, index: dict[str, Any]) -> tuple[ModularRolePipeline, WarmUp]:
    """The roles of the model whose ``index`` lies in ``folder``, and what warms them up.

    Raises `ConfigError` for what the model cannot do, before any weights are read, and `ModelError` for a component
    that cannot be loaded.
    """
    plan = _Plan(loading, folder, index)
    pipeline, loaded = plan.load()
    return pipeline, lambda own: plan.warm_up(own, pipeline, loaded)


def load_weightless(loading: Loading, folder: Path, index: dict[str, Any]) -> ModularRolePipeline:
    """All roles of that model on `ghosts`, whatever ``loading`` serves, of which nothing is read if that is nothing."""
    plan = _Plan(loading, folder, index)
    pipeline, _ = plan.load()
    return plan.on_ghosts(pipeline, ROLES)


class _Plan:
    """What is known from configs alone: the cut, who needs which component, the schema, and who shares what."""

    def __init__(self, loading: Loading, folder: Path, index: dict[str, Any]) -> None:
        model, own = loading.model, loading.roles
        self._index = index
        self._present = index_components(index)
        self._whole = whole = _whole_pipeline(folder, index)
        self._kind = type(whole).__name__
        self._family = family_of(self._kind)
        blocks = draw_elsewhere(exchange(whole.blocks, self._family.exchanged), self._family.draw_on_device)
        blocks = instruct(pass_on(blocks, self._family.pictures.as_given), self._family.system_message)
        picture = whether_picture(index, self._family, model.task)
        self._parts = cut(self._kind, blocks, picture=picture)
        self._owners = self._needed(own)
        if model.previews and any(entry.name == CHUNK for entry in self._parts.inputs):
            raise ConfigError(f"previews: {self._kind} denoises chunk after chunk, in a loop that is closed")
        self._shows = model.previews and loading.serves(Role.DENOISER)
        read = loading.from_model(self._owners)
        wanted = [*read, *loading.from_model(["vae"] if self._shows else [])]
        self._folder = resolve_source(model.path, wanted, model.revision)
        read_ahead(self._folder, read)
        self._stand_ins = {
            name: stand_in(self._folder, name, *entry, loading.dtype) for name, entry in self._present.items()
        }
        _put(whole, {name: value for name, value in self._stand_ins.items() if value is not None})
        changing = {name: guider for name, guider in whole.components.items() if changes_model(guider)}
        if changing:
            kinds = ", ".join(type(guider).__name__ for guider in changing.values())
            loading = loading.without_kernels(f"{kinds} changes the model for some of its branches")
        self._loading = loading
        _refuse_beside(changing, loading.model, self._kind)
        self._schema = self._whole_schema()  # what cannot be is said before the weights are loaded
        guided = is_guided(self._parts)
        used = [spec.name for spec in self._parts.executed[Role.DENOISER].expected_components]
        self._shares = Shares(
            loading.team, own, self._present, self._stand_ins, used, guided=guided, off=guidance_is_off(self._schema)
        )
        most, brings = min(loading.at_once, MOST_AT_ONCE), bool(model.offload)
        self._clock = StepClock()
        batcher = ForwardBatcher(most=most, brings_weights=brings, memory=self._clock.memory)
        self._batcher = batcher if model.batching else None
        joins = model.batch_guidance and loading.serves(Role.DENOISER)
        self._joined = BranchBatching(brings_weights=brings) if joins else None
        if self._joined is not None and not guided:
            raise ConfigError(f"batch-guidance: {self._kind} has no guidance with a forward for each branch")

    def load(self) -> tuple[ModularRolePipeline, Mapping[str, Any]]:
        """Read the weights and prepare them; the pipeline, and its components by name."""
        loading, model = self._loading, self._loading.model
        own = tuple(role for role in ROLES if loading.serves(role))
        loaded = {
            name: loading.fetch(self._folder, name, self._present[name], role) for name, role in self._owners.items()
        }
        adapted = [part.pipeline for part in self._built(loaded, own).values()] if model.loras else []
        adapters = attach(model.loras, adapted, modules_of(loaded), written=model.writes_adapters)
        clock = self._clock
        techniques = outfit(
            model, loaded, self._owners, loading.where, loading.dtype, loading.tally, clock.memory, self._batcher,
            loading.agree(),
        )  # fmt: skip
        if model.step_cache and loading.serves(Role.DENOISER) and not clock.memory.wanted:
            raise ConfigError(f"step-cache={model.step_cache}: {self._kind} has no model whose blocks it knows")
        weights = weights_of(self._folder, model.components)
        adapted_by = identities(model.loras, written=model.writes_adapters)
        loading.meet((weights, *adapted_by), loaded, techniques)
        shared, parallel = self._shares.share(loaded, loading.tally)
        techniques += parallel
        if self._joined is not None:
            techniques += _join_branches(self._joined, loaded)
        pipeline = ModularRolePipeline(
            loaded=self._built(loaded, own),
            cut=self._parts,
            family=self._family,
            schema=self._schema,
            fingerprint=fingerprint(loading.device, loading.dtype, weights, (*techniques, *adapted_by)),
            device=loading.where,
            clock=clock,
            batcher=self._batcher,
            shared=shared or self._joined,
            adapters=adapters,
            projection=self._projection(loaded),
            sharing=self._shares.words,
            prepares=Role.DENOISER not in model.offload,
        )
        return pipeline, loaded

    def warm_up(self, own: RolePipeline, pipeline: ModularRolePipeline, loaded: Mapping[str, Any]) -> None:
        """Run a request of each declared shape through ``own``, with ghosts in the place of the other roles."""
        loading, shapes = self._loading, self._loading.model.warmup
        if not shapes:
            return
        before = self.on_ghosts(pipeline, tuple(role for role in ROLES if not loading.serves(role)))
        denoisers = sum(name.startswith("transformer") for name in loaded)
        if self._batcher is not None:
            self._batcher.profiling = True
        guided, plain = self._shares.token_ranks
        unguided = plain if plain != guided else None
        rehearse(own, before, shapes, denoisers=denoisers, tally=loading.tally, ranks=guided, unguided=unguided)
        if self._batcher is not None:
            self._batcher.profiling = False

    def on_ghosts(self, pipeline: ModularRolePipeline, roles: tuple[Role, ...]) -> ModularRolePipeline:
        """The model's ``roles`` without weights."""
        loading = self._loading
        made = ghosts(self._folder, list(self._needed(roles)), self._present, loading.dtype, loading.where)
        return pipeline.with_parts(self._built(made, roles))

    def _whole_schema(self) -> RequestSchema:
        model = self._loading.model
        schema = build_schema(
            model.path, self._index, self._whole, self._parts, self._family, read_settings(self._folder)
        )
        schema = msgspec.structs.replace(schema, commit=self._loading.commit)
        schema = with_adapters(with_previews(schema) if model.previews else schema, model.loras, type(self._whole))
        return with_defaults(schema, model.defaults)

    def _projection(self, loaded: Mapping[str, Any]) -> Any:
        """From latents to colours, for previews; None where there are none."""
        if not self._shows:
            return None
        vae = loaded["vae"] if "vae" in loaded else self._loading.fetch(self._folder, "vae", self._present["vae"])
        return fit(vae, self._loading.where)

    def _needed(self, roles: tuple[Role, ...]) -> dict[str, Role]:
        """Components that the blocks of ``roles`` load from the checkpoint, in the order of their declaration, each
        with the last role that uses it."""
        left_out = _left_out(self._index)
        names: dict[str, Role] = {}
        for role in roles:
            for spec in self._parts.executed[role].expected_components:
                if spec.default_creation_method != "from_pretrained":
                    continue
                if role is Role.DENOISER and spec.name in self._family.facts_only:
                    continue
                if spec.name not in self._present:
                    if spec.name in left_out:
                        continue
                    raise ModelError(f"component {spec.name!r}, which the {role} needs, is not in the model's index")
                names[spec.name] = role
        return names

    def _built(self, made: Mapping[str, Any], roles: Iterable[Role]) -> dict[Role, LoadedRole]:
        return {role: self._role_pipeline(role, made) for role in roles}

    def _role_pipeline(self, role: Role, loaded: Mapping[str, Any]) -> LoadedRole:
        whole, blocks = self._whole, self._parts.parts[role]
        pipeline = type(whole)(blocks=blocks, config_dict=self._index)
        own = {name: loaded[name] for name in pipeline.pretrained_component_names if name in loaded}
        # What is made from a config is made by the first block of the whole pipeline that declares it; a part alone
        # would let another block's declaration win. Each role gets its own copy.
        made = {
            name: copy.deepcopy(getattr(whole, name))
            for name in pipeline.config_component_names
            if getattr(whole, name, None) is not None
        }
        _put(pipeline, {name: value for name, value in self._stand_ins.items() if value is not None})
        _put(pipeline, own | made)
        return LoadedRole(role=role, pipeline=pipeline, blocks=blocks)


def _refuse_beside(guiders: Mapping[str, Any], model: ModelConfig, kind: str) -> None:
    """Raise `ConfigError` for options that take forwards for alike which ``guiders`` have changed the model for."""
    options = {
        "batching": model.batching,
        "batch-guidance": model.batch_guidance,
        "step-cache": bool(model.step_cache),
        f"profile={model.profile}": model.profile != "stock",
    }
    for name, guider in guiders.items():
        if asked := next((option for option, given in options.items() if given), None):
            guided = f"{type(guider).__name__}, the {name} of this {kind}"
            raise ConfigError(f"{asked}: {guided}, changes the model for some of its branches")


def _join_branches(joined: BranchBatching, loaded: Mapping[str, Any]) -> tuple[str, ...]:
    """Install it in a denoiser's models; what changes results by it, for the fingerprint."""
    for name, component in loaded.items():
        if name.startswith("transformer"):
            joined.install(component)
    return ("branches of guidance joined",)


def _whole_pipeline(folder: Path, index: dict[str, Any]) -> Any:
    """The uncut modular pipeline without weights, of the class that stands for the folder's classic one."""
    import diffusers

    classic = index["_class_name"]
    counterpart = modular_counterpart(index)
    assert counterpart is not None
    try:
        return getattr(diffusers, counterpart)(pretrained_model_name_or_path=str(folder), config_dict=index)
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        raise ModelError(f"model {str(folder)!r}: the modular pipeline of {classic} fails: {error}") from error


def _left_out(index: Mapping[str, Any]) -> frozenset[str]:
    """Components that the model does without: its index says so, or its class lets them be absent."""
    optional: Any = getattr(getattr(diffusers, index["_class_name"], None), "_optional_components", ())
    return frozenset({*optional, *(name for name, entry in index.items() if entry in (None, [None, None]))})


def _put(pipeline: Any, components: Mapping[str, Any]) -> None:
    for name, component in components.items():
        setattr(pipeline, name, component)
