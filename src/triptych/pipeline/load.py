"""Load the roles that a process serves: their components' weights, stand-ins for all others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from triptych.accel.attention import COMPILING
from triptych.accel.batching import MOST_AT_ONCE
from triptych.accel.compiling import allow_many_graphs, count_compilations, default_folder, keep_graphs_in
from triptych.accel.parallel.team import Team
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.errors import ConfigError, ModelError
from triptych.ids import Role
from triptych.pipeline.capabilities import for_task
from triptych.pipeline.known import modular_counterpart
from triptych.pipeline.loading import Loading, WarmUp
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.modular_load import load_modular, load_weightless
from triptych.pipeline.rehearsal import rehearse
from triptych.pipeline.replay import ReplayRolePipeline
from triptych.pipeline.replay_load import load_replay
from triptych.pipeline.source import commit_of, index_components, read_index, resolve_source
from triptych.pipeline.weights import LoadComponent, load_component

log = logging.getLogger(__name__)


def load_pipeline(
    model: ModelConfig,
    roles: tuple[Role, ...],
    device: str,
    tally: Tally | None = None,
    component: LoadComponent = load_component,
    at_once: int = MOST_AT_ONCE,
) -> ModularRolePipeline | ReplayRolePipeline:
    """The pipeline of ``model`` with the weights of ``roles`` on ``device`` (a torch device name), warmed up.

    Cut at its modular blocks where Diffusers has them for the model's class, else by record and replay. What its
    accelerations do is counted in ``tally``; ``component`` is what gives a component its weights; ``at_once`` is how
    many requests will be computed by turns.

    Raises `ModelError` for a folder that cannot be loaded or split, naming the component.
    """
    pipeline, warm_up = load_cold(model, roles, device, tally, component=component, at_once=at_once)
    warm_up(pipeline)
    return pipeline


def load_cold(
    model: ModelConfig,
    roles: tuple[Role, ...],
    device: str,
    tally: Tally | None = None,
    team: Team | None = None,
    component: LoadComponent = load_component,
    at_once: int = MOST_AT_ONCE,
) -> tuple[ModularRolePipeline | ReplayRolePipeline, WarmUp]:
    """The same, and apart from it what warms it up.

    With a ``team`` the denoiser computes this rank's share, and all ranks load at the same time. Raises `ConfigError`
    besides, for a model that the team cannot share.
    """
    loading = Loading(
        model=model, roles=roles, device=device, tally=tally or Tally(), team=team, component=component, at_once=at_once
    )
    quiet_libraries()
    loading = _ready_to_compile(loading.settled())
    model = loading.model
    folder = resolve_source(model.path, revision=model.revision)
    if commit := commit_of(model.path, folder):
        loading = loading.at(commit)
        log.info("model=%s commit=%s revision=%s", model.path, loading.commit, model.revision or "main")
        if loading.commit != commit:
            folder = resolve_source(model.path, revision=loading.commit)
    index = for_task(read_index(folder), model.task)
    _check_overrides(model.components, index_components(index))
    if modular_counterpart(index) is not None:
        return load_modular(loading, folder, index)
    _check_replayable(loading, index["_class_name"])
    replayed = load_replay(loading, index)
    # A classic pipeline computes its branches in one forward.
    return replayed, lambda own: rehearse(own, None, model.warmup, denoisers=1, tally=loading.tally, unguided=1)


def _ready_to_compile(loading: Loading) -> Loading:
    """With a folder for graphs where any may be compiled, or without kernels where nobody has said where else to keep
    them and the usual folder cannot be had."""
    model = loading.model
    if model.profile != "stock" or not COMPILING.isdisjoint(model.attention_backend.split(",")):
        try:
            keep_graphs_in(model.cache_dir or default_folder())
        except ConfigError as error:
            if not loading.chosen or model.cache_dir is not None:
                raise
            return loading.without_kernels(str(error))
        count_compilations(loading.tally)
        allow_many_graphs()
    return loading


def weightless_pipeline(model: ModelConfig, device: str) -> ModularRolePipeline | None:
    """All roles of ``model`` without weights: what they hand on has its shapes, and zeros for what a model computes.

    None for a model that is split by replaying its own loop.
    """
    quiet_libraries()
    folder = resolve_source(model.path, revision=model.revision)
    index = for_task(read_index(folder), model.task)
    if modular_counterpart(index) is None:
        return None
    loading = Loading(model=model, roles=(), device=device, tally=Tally(), team=None, component=load_component)
    return load_weightless(loading, folder, index)


def _check_replayable(loading: Loading, kind: str) -> None:
    model = loading.model
    if model.batching and loading.roles != (Role.DECODER,):
        raise ConfigError(f"batching: {kind} is split by replaying its own loop, which runs alone")
    if model.batch_guidance and loading.serves(Role.DENOISER):
        raise ConfigError(f"batch-guidance: {kind} is split by replay, and batches its branches itself")
    if model.step_cache and loading.serves(Role.DENOISER):
        raise ConfigError(
            f"step-cache={model.step_cache}: {kind} is split by replaying its own loop, which has no room"
        )
    if model.previews:
        raise ConfigError(f"previews: {kind} is split by replaying its own loop, which is closed")


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


def _check_overrides(overrides: Mapping[str, str], present: Mapping[str, tuple[str, str]]) -> None:
    for name, path in overrides.items():
        if name not in present:
            raise ModelError(f"component {name!r}: the model has no such component, only {', '.join(sorted(present))}")
        if not Path(path).expanduser().exists():
            raise ModelError(f"component {name!r}: {path!r} does not exist")
