"""Load the roles that a process serves: their components' weights, stand-ins for all others."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import diffusers
import torch

from triptych.accel.batching import ForwardBatcher
from triptych.accel.branches import BranchBatching
from triptych.accel.compiling import count_compilations, default_folder, keep_graphs_in
from triptych.accel.parallel.team import Team
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.errors import ConfigError, ModelError
from triptych.ids import ROLES, Role
from triptych.pipeline.cut import Cut, cut
from triptych.pipeline.families import family_of
from triptych.pipeline.fingerprint import fingerprint
from triptych.pipeline.known import begins_with_picture, modular_counterpart
from triptych.pipeline.lora import attach, identities, with_adapters
from triptych.pipeline.modular import LoadedRole, ModularRolePipeline
from triptych.pipeline.outfit import home_of, modules_of, outfit
from triptych.pipeline.passing import pass_on
from triptych.pipeline.preview import fit, with_previews
from triptych.pipeline.readahead import read_ahead
from triptych.pipeline.rehearsal import ghosts, rehearse
from triptych.pipeline.replay import ReplayRolePipeline
from triptych.pipeline.replay_load import load_replay
from triptych.pipeline.request import with_defaults
from triptych.pipeline.schema import build_schema, read_settings
from triptych.pipeline.sharing import PictureSharing, SharingPlan, TextSharing
from triptych.pipeline.source import index_components, read_index, resolve_source
from triptych.pipeline.stage import RolePipeline
from triptych.pipeline.standin import stand_in
from triptych.pipeline.steps import StepClock
from triptych.pipeline.tasks import for_task
from triptych.pipeline.weights import LoadComponent, load_component

WarmUp: TypeAlias = Callable[[RolePipeline], None]
"""Runs a request of each declared shape through a pipeline that was loaded, or one that wraps it."""


def load_pipeline(
    model: ModelConfig,
    roles: tuple[Role, ...],
    device: str,
    tally: Tally | None = None,
    component: LoadComponent = load_component,
) -> ModularRolePipeline | ReplayRolePipeline:
    """The pipeline of ``model`` with the weights of ``roles`` on ``device`` (a torch device name), warmed up.

    Cut at its modular blocks where Diffusers has them for the model's class, else by record and replay. What its
    accelerations do is counted in ``tally``; ``component`` is what gives a component its weights.

    Raises `ModelError` for a folder that cannot be loaded or split, naming the component.
    """
    pipeline, warm_up = load_cold(model, roles, device, tally, component=component)
    warm_up(pipeline)
    return pipeline


def load_cold(
    model: ModelConfig,
    roles: tuple[Role, ...],
    device: str,
    tally: Tally | None = None,
    team: Team | None = None,
    component: LoadComponent = load_component,
) -> tuple[ModularRolePipeline | ReplayRolePipeline, WarmUp]:
    """The same, and apart from it what warms it up.

    With a ``team`` the denoiser computes this rank's share, and all ranks load at the same time. Raises `ConfigError`
    besides, for a model that the team cannot share.
    """
    tally = tally or Tally()
    quiet_libraries()
    if model.profile != "stock":
        keep_graphs_in(model.cache_dir or default_folder())
        count_compilations(tally)
    folder = resolve_source(model.path)
    index = for_task(read_index(folder), model.task)
    present = index_components(index)
    _check_overrides(model.components, present)
    if modular_counterpart(index) is None:
        if model.batching and roles != (Role.DECODER,):
            raise ConfigError(f"batching: {index['_class_name']} is split by replaying its own loop, which runs alone")
        if model.batch_guidance and Role.DENOISER in roles:
            raise ConfigError(
                f"batch-guidance: {index['_class_name']} is split by replay, and batches its branches itself"
            )
        if model.previews:
            raise ConfigError(f"previews: {index['_class_name']} is split by replaying its own loop, which is closed")
        replayed = load_replay(model, index, roles, device, tally, team, component)
        return replayed, lambda own: rehearse(own, None, model.warmup, denoisers=1, tally=tally)
    return _load_modular(model, folder, index, present, roles, device, tally, team, component)


def _load_modular(
    model: ModelConfig,
    folder: Path,
    index: dict[str, Any],
    present: Mapping[str, tuple[str, str]],
    roles: tuple[Role, ...],
    device: str,
    tally: Tally,
    team: Team | None,
    component: LoadComponent,
) -> tuple[ModularRolePipeline, WarmUp]:
    dtype: torch.dtype = getattr(torch, model.effective_dtype)
    whole = _whole_pipeline(folder, index)
    family = family_of(type(whole).__name__)
    blocks = pass_on(whole.blocks, family.pictures.as_given)
    parts = cut(type(whole).__name__, blocks, picture=begins_with_picture(index))
    needed = functools.partial(_needed, parts, present, _left_out(index), family.facts_only)
    owners = needed(roles)
    shows = model.previews and Role.DENOISER in roles
    folder = resolve_source(model.path, [*owners, "vae"] if shows else owners)
    read_ahead(folder, [name for name in owners if name not in model.components])
    stand_ins = {name: stand_in(folder, name, *entry, dtype) for name, entry in present.items()}
    _put(whole, {name: value for name, value in stand_ins.items() if value is not None})
    schema = build_schema(model.path, index, whole, parts, family, read_settings(folder))
    schema = with_adapters(with_previews(schema) if model.previews else schema, model.loras)
    schema = with_defaults(schema, model.defaults)  # what cannot be is said before the weights are loaded
    sharing = None if team is None or Role.DENOISER not in roles else _sharing(team, whole, parts, stand_ins)
    joined = BranchBatching() if model.batch_guidance and Role.DENOISER in roles else None
    if joined is not None and not _guided(whole):
        raise ConfigError(f"batch-guidance: {type(whole).__name__} has no guidance with a forward for each branch")
    text = None if team is None or team.wish.encoder_tp == 1 else TextSharing(team, present, stand_ins)
    pictures = None if team is None or team.wish.decoder_tp == 1 else PictureSharing(team, present, stand_ins)
    where = torch.device(device)

    def load(name: str, home: torch.device) -> Any:
        return component(folder, name, present[name], model.components.get(name), dtype, home)

    def built(made: Mapping[str, Any], these: Iterable[Role]) -> dict[Role, LoadedRole]:
        return {role: _role_pipeline(role, whole, index, parts, made, stand_ins) for role in these}

    own = tuple(role for role in ROLES if role in roles)
    loaded = {name: load(name, home_of(model, role, where)) for name, role in owners.items()}
    adapted = [part.pipeline for part in built(loaded, own).values()] if model.loras else []
    adapters = attach(model.loras, adapted, modules_of(loaded))
    clock = StepClock()
    batcher = ForwardBatcher() if model.batching else None
    techniques = outfit(
        model, loaded, owners, where, dtype, tally, clock.memory, batcher, str if team is None else team.agree
    )
    shared = None if sharing is None else sharing.share(loaded)
    techniques += (() if shared is None else shared.techniques) + (() if text is None else text.share(loaded))
    techniques += () if pictures is None else pictures.share(loaded)
    if joined is not None:
        techniques += _join_branches(joined, loaded)
    pipeline = ModularRolePipeline(
        loaded=built(loaded, own),
        cut=parts,
        family=family,
        schema=schema,
        fingerprint=fingerprint(device, dtype, model.components, (*techniques, *identities(model.loras))),
        device=where,
        clock=clock,
        batcher=batcher,
        shared=shared or joined,
        adapters=adapters,
        projection=fit(loaded["vae"] if "vae" in loaded else load("vae", where), where) if shows else None,
    )

    def warm_up(own: RolePipeline) -> None:
        if not model.warmup:
            return
        others = tuple(role for role in ROLES if role not in roles)
        made = ghosts(folder, list(needed(others)), present, dtype, where)
        before = pipeline.with_parts(built(made, others))
        denoisers = sum(name.startswith("transformer") for name in loaded)
        if batcher is not None:
            batcher.profiling = True
        rehearse(own, before, model.warmup, denoisers=denoisers, tally=tally)
        if batcher is not None:
            batcher.profiling = False

    return pipeline, warm_up


def _sharing(team: Team, whole: Any, parts: Cut, stand_ins: Mapping[str, Any]) -> SharingPlan:
    used = [spec.name for spec in parts.executed[Role.DENOISER].expected_components]
    return SharingPlan(team, stand_ins, used, guided=_guided(whole))


def _guided(whole: Any) -> bool:
    """Whether guidance is computed as one forward for each branch."""
    return any(hasattr(getattr(whole, name, None), "prepare_models") for name in whole.config_component_names)


def _join_branches(joined: BranchBatching, loaded: Mapping[str, Any]) -> tuple[str, ...]:
    """Install it in a denoiser's models; what changes results by it, for the fingerprint."""
    for name, component in loaded.items():
        if name.startswith("transformer"):
            joined.install(component)
    return ("branches of guidance joined",)


def quiet_libraries() -> None:
    """Turn off progress bars and advisory logging of the model libraries, whose errors reach us as exceptions."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Blocks log one traceback per nesting level for an exception that they also raise.
    logging.getLogger("diffusers.modular_pipelines.modular_pipeline").setLevel(logging.CRITICAL)


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


def _check_overrides(overrides: Mapping[str, str], present: Mapping[str, tuple[str, str]]) -> None:
    for name, path in overrides.items():
        if name not in present:
            raise ModelError(f"component {name!r}: the model has no such component, only {', '.join(sorted(present))}")
        if not Path(path).expanduser().exists():
            raise ModelError(f"component {name!r}: {path!r} does not exist")


def _left_out(index: Mapping[str, Any]) -> frozenset[str]:
    """Components that the model does without: its index says so, or its class lets them be absent."""
    optional: Any = getattr(getattr(diffusers, index["_class_name"], None), "_optional_components", ())
    return frozenset({*optional, *(name for name, entry in index.items() if entry in (None, [None, None]))})


def _needed(
    parts: Cut,
    present: Mapping[str, tuple[str, str]],
    left_out: frozenset[str],
    facts_only: frozenset[str],
    roles: tuple[Role, ...],
) -> dict[str, Role]:
    """Components that the blocks of ``roles`` load from the checkpoint, in the order of their declaration, each with
    the last role that uses it."""
    names: dict[str, Role] = {}
    for role in roles:
        for spec in parts.executed[role].expected_components:
            if spec.default_creation_method != "from_pretrained":
                continue
            if role is Role.DENOISER and spec.name in facts_only:
                continue
            if spec.name not in present:
                if spec.name in left_out:
                    continue
                raise ModelError(f"component {spec.name!r}, which the {role} needs, is not in the model's index")
            names[spec.name] = role
    return names


def _put(pipeline: Any, components: Mapping[str, Any]) -> None:
    for name, component in components.items():
        setattr(pipeline, name, component)


def _role_pipeline(
    role: Role,
    whole: Any,
    index: dict[str, Any],
    parts: Cut,
    loaded: Mapping[str, Any],
    stand_ins: Mapping[str, Any],
) -> LoadedRole:
    pipeline = type(whole)(blocks=parts.parts[role], config_dict=index)
    own = {name: loaded[name] for name in pipeline.pretrained_component_names if name in loaded}
    # What is made from a config is made by the first block of the whole pipeline that declares it; a part alone would
    # let another block's declaration win. Each role gets its own copy.
    made = {
        name: copy.deepcopy(getattr(whole, name))
        for name in pipeline.config_component_names
        if getattr(whole, name, None) is not None
    }
    _put(pipeline, {name: value for name, value in stand_ins.items() if value is not None})
    _put(pipeline, own | made)
    return LoadedRole(role=role, pipeline=pipeline, blocks=parts.parts[role])
